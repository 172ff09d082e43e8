"""Greedy decoding token by token against ``model.generate``, on several architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fedloom.adapters.inject import default_targets
from fedloom.adapters.moe_lora import Routing
from fedloom.backbones.load import Backbone
from fedloom.data.tokenize import end_token_id
from fedloom.evaluation.generate import greedy
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec
from small_world import small_tokenizer

LLAMA = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3": LLAMA | {"head_dim": 8},
    "mistral": LLAMA | {"sliding_window": 6},
    "gpt2": {
        "vocab_size": 258,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    },
}
EXPERTS, NEW = 3, 12

PROMPTS = [
    [72, 101],
    [65, 66, 67, 68, 69, 70, 71],
    [90],
    [33, 44, 55, 66],
    [72, 101],
    [200, 10, 20, 30, 40, 50, 60, 61, 62],
]
SOFT = torch.tensor(
    [[0.2, 0.3, 0.5], [0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.4, 0.3, 0.3], [0.0, 0.1, 0.9], [0.3, 0.3, 0.4]]
)
TOP1 = torch.tensor([0, 2, 1, 0, 1, 2])
ROUTINGS = {"soft": SOFT, "top1": TOP1, "off": None, "shared": torch.full((6,), 1)}


@pytest.fixture(scope="module", params=CONFIGS)
def bench(request: pytest.FixtureRequest) -> Workbench:
    config = AutoConfig.for_model(request.param, **CONFIGS[request.param])
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config).eval()
        made = Workbench(Backbone("x", model, small_tokenizer(), ""), spec := _spec(config), None)
        tensors = {n: 0.5 * torch.randn_like(t) for n, t in made.grafted.read().items()}
    made.load(tensors, spec)
    return made


def _spec(config: Any) -> AdapterSpec:
    return AdapterSpec(default_targets(config), rank=2, alpha=4.0, experts=EXPERTS)


def generate(bench: Workbench, prompts: list[list[int]], routing: Routing, stop: list[int]) -> list[list[int]]:
    """Return transformers' greedy continuations, cut before the first stop token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[257] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with bench.grafted.routing(routing), torch.no_grad():
        out = bench.backbone.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            num_beams=1,
            max_new_tokens=NEW,
            pad_token_id=257,
            eos_token_id=stop or None,
        )
    found = []
    for row in out[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in stop]
        found.append(row[: ends[0]] if ends else row)
    return found


def one_by_one(bench: Workbench, routing: Routing, stop: list[int]) -> list[list[int]]:
    parts = [None if routing is None else routing[i : i + 1] for i in range(len(PROMPTS))]
    return [generate(bench, [p], part, stop)[0] for p, part in zip(PROMPTS, parts, strict=True)]


def early_stops(answers: list[list[int]]) -> list[int]:
    """Return tokens that end some answers early and leave others whole."""
    return [answers[0][3], answers[1][0], answers[3][5]]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_greedy_is_generate_token_by_token(bench: Workbench, routing: str) -> None:
    """Mixed lengths in one batch, and each prompt alone: the same tokens as transformers gives each prompt alone."""
    gates = ROUTINGS[routing]
    expected = one_by_one(bench, gates, [])
    assert all(len(answer) == NEW for answer in expected)
    assert greedy(bench, PROMPTS, gates, NEW, []) == expected
    assert greedy(bench, PROMPTS, gates, NEW, [], batch_size=1) == expected
    assert greedy(bench, PROMPTS, gates, NEW, [], batch_size=4) == expected


@pytest.mark.parametrize("routing", ROUTINGS)
def test_greedy_stops_where_generate_stops(bench: Workbench, routing: str) -> None:
    """Rows leave the batch at different steps; those that stay must not notice."""
    gates = ROUTINGS[routing]
    stop = early_stops(one_by_one(bench, gates, []))
    expected = one_by_one(bench, gates, stop)
    assert len({len(answer) for answer in expected}) > 1
    assert greedy(bench, PROMPTS, gates, NEW, stop) == expected
    assert greedy(bench, PROMPTS, gates, NEW, stop, batch_size=2) == expected
    assert generate(bench, PROMPTS, gates, stop) == expected


def test_prompts_of_one_length_need_no_mask(bench: Workbench) -> None:
    prompts = [[72, 101, 108], [65, 66, 67], [9, 8, 7]]
    expected = generate(bench, prompts, SOFT[:3], [])
    assert greedy(bench, prompts, SOFT[:3], NEW, []) == expected


def test_routing_matters(bench: Workbench) -> None:
    """So that the comparisons above say something."""
    answers = [greedy(bench, PROMPTS, gates, NEW, []) for gates in ROUTINGS.values()]
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])
    soft = answers[0]
    assert soft[0] != soft[4]  # one prompt under two gate vectors
    assert len({token for answer in soft for token in answer}) > 10


def test_edges(bench: Workbench) -> None:
    assert greedy(bench, [], None, NEW, [256]) == []
    assert greedy(bench, PROMPTS[:2], TOP1[:2], 0, [256]) == [[], []]
    first = greedy(bench, PROMPTS[:2], TOP1[:2], 1, [])
    assert [len(answer) for answer in first] == [1, 1]
    every = list(range(258))
    assert greedy(bench, PROMPTS[:2], TOP1[:2], NEW, every) == [[], []]
    done: list[int] = []
    greedy(bench, PROMPTS, TOP1, 1, [], batch_size=4, advance=done.append)
    assert done == [4, 2]


def test_D5_the_end_token_of_training_is_the_stop_token() -> None:
    assert end_token_id(small_tokenizer()) == 256
