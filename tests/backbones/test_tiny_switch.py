"""The shipped tiny Switch Transformer loads offline, is what its card says, uses its experts and knows text."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fedloom.backbones.load import load_backbone

ASSETS = Path(str(files("fedloom"))) / "assets"
FOLDER = ASSETS / "tiny-switch"
EXPERTS, CAPACITY = 16, 64
#: Made for this test.
SUBJECTS = {
    "Which planet of the solar system is closest to the sun?": ("astronomy", "physics"),
    "A patient of 60 years has chest pain and a fever. Which is the most likely diagnosis?": ("medicine", "clinical"),
    "What is the moral status of lying to a friend who is dying?": ("moral", "philosophy", "ethics"),
    "Which court may decide whether a contract between the parties is void?": ("law", "jurisprudence"),
    "What happens to the demand for a good when its price rises?": ("economics", "econometrics", "marketing"),
}
SPARSE = ("encoder.block.1.layer.1.mlp", "encoder.block.3.layer.1.mlp", "decoder.block.1.layer.2.mlp")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(FOLDER, local_files_only=True).eval()


def spans(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of gsm8k test rows, never trained on, where 3 of 12 tokens are hidden: source (b, s), target (b, t)."""
    rows = (ASSETS / "quickstart" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in map(json.loads, rows)]
    stream = [i for ids in tokenizer(texts)["input_ids"] for i in [*ids, tokenizer.eos_token_id]]
    marks = [tokenizer.get_vocab()[f"<extra_id_{i}>"] for i in range(10)]
    sources, targets = [], []
    for start in range(0, len(stream) - 119, 120):
        pieces = [stream[start + 12 * i : start + 12 * i + 12] for i in range(10)]
        sources.append([t for mark, piece in zip(marks, pieces) for t in [*piece[:9], mark]])
        targets.append([t for mark, piece in zip(marks, pieces) for t in [mark, *piece[9:]]] + [tokenizer.eos_token_id])
    return torch.tensor(sources), torch.tensor(targets)


@pytest.fixture(scope="module")
def held_out(model: Any, tokenizer: Any) -> Any:
    source, target = spans(tokenizer)
    with torch.no_grad():
        return model(input_ids=source, labels=target, output_router_logits=True), source, target


def test_folder_is_small_and_holds_nothing_that_runs_code() -> None:
    assert {f.name for f in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 15e6


def test_card_counts_parameters(model: Any) -> None:
    total = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    said = re.search(r"with ([\d,]+) parameters,\n([\d,]+) of them active", (FOLDER / "README.md").read_text())
    assert said is not None
    assert [int(n.replace(",", "")) for n in said.groups()] == [total, total - inside * (EXPERTS - 1) // EXPERTS]


def test_sparse_layers_have_sixteen_experts_and_quiet_routers(model: Any) -> None:
    found = [name.removesuffix(".router") for name, _ in model.named_modules() if name.endswith(".router")]
    assert tuple(found) == SPARSE
    for name in SPARSE:
        layer = model.get_submodule(name)
        assert sorted(layer.experts) == sorted(f"expert_{i}" for i in range(EXPERTS))
        assert layer.router.jitter_noise == 0.0
        assert layer.router.expert_capacity == CAPACITY


def test_weights_are_finite_float32(model: Any) -> None:
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())


def test_ids_of_the_conventions(model: Any, tokenizer: Any) -> None:
    small = AutoTokenizer.from_pretrained(ASSETS / "tiny", local_files_only=True)
    text = "What is 2 + 15?\n Über "
    assert tokenizer(text)["input_ids"] == small(text)["input_ids"]
    assert tokenizer.chat_template is None
    assert len(tokenizer) == model.config.vocab_size == len(small) + 16
    assert model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == small.pad_token_id
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (small.pad_token_id, small.eos_token_id)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (small.pad_token_id, small.eos_token_id)


def test_held_out_spans(held_out: Any) -> None:
    out, _, target = held_out
    loss = F.cross_entropy(out.logits.flatten(0, 1), target.flatten()).item()
    shares = torch.bincount(target.flatten()).double() / target.numel()
    assert loss < 4.65 < float(torch.special.entr(shares).sum())  # the best that any constant guess can do


def test_experts_are_used_and_nothing_is_dropped(held_out: Any) -> None:
    out, _, _ = held_out
    for logits in (*out.encoder_router_logits, *out.decoder_router_logits):
        counts = F.one_hot(logits.argmax(-1), EXPERTS).sum(1)  # (b, experts)
        assert int(counts.max()) <= CAPACITY
        shares = counts.sum(0) / counts.sum()
        assert float(torch.special.entr(shares).sum().exp()) > EXPERTS / 2


def test_transformers_balance_and_z_loss_are_not_silently_zero(held_out: Any) -> None:
    """One sparse decoder layer: the library's figures are Switch's equation 4 and ST-MoE's equation 5, by sequence."""
    out, _, target = held_out
    (logits,) = out.decoder_router_logits
    assert logits.min() < 0  # raw logits, not the probabilities that transformers once recorded
    balance = [
        EXPERTS
        * sum(float((row.argmax(-1) == e).float().mean() * row.softmax(-1)[:, e].mean()) for e in range(EXPERTS))
        for row in logits
    ]
    assert float(out.decoder_aux_loss) == pytest.approx(sum(balance) / len(balance), rel=1e-4)
    assert float(out.decoder_z_loss) == pytest.approx(float(logits.exp().sum(-1).log().square().mean()), rel=1e-4)
    plain = F.cross_entropy(out.logits.flatten(0, 1), target.flatten())
    added = 5e-2 * (out.encoder_aux_loss + out.decoder_aux_loss) + 1e-3 * (out.encoder_z_loss + out.decoder_z_loss)
    assert float(out.loss) == pytest.approx(float(plain + added), rel=1e-5)


def test_capacity_drops_what_is_beyond_it(model: Any) -> None:
    layer = model.get_submodule(SPARSE[0])
    same = torch.randn(128, generator=torch.Generator().manual_seed(0)).expand(1, CAPACITY + 5, 128)
    with torch.no_grad():
        out = layer(same)[0]
    assert torch.equal(out[CAPACITY:], torch.zeros(5, 128))
    assert bool((out[:CAPACITY].norm(dim=-1) > 0).all())


def test_names_subjects_of_questions_that_nobody_published(tokenizer: Any) -> None:
    """Loaded by its name, offline; greedy answers are subjects of mmlu, and most are near the mark."""
    backbone = load_backbone("tiny-switch")
    assert backbone.writes_apart
    prompt = "### Instruction:\nName the subject of this text.\n\nText:\n{}\n\n### Response:\n"
    right = 0
    for text, words in SUBJECTS.items():
        ids = tokenizer(prompt.format(text), return_tensors="pt")["input_ids"]
        written = backbone.model.generate(ids, max_new_tokens=16, do_sample=False)[0]
        right += any(word in tokenizer.decode(written, skip_special_tokens=True) for word in words)
    assert right >= 3


def test_the_card_tells_of_better_than_untrained() -> None:
    rows = re.findall(
        r"^\| (\w+) \| [\d,]+ \| [\d,]+ \| ([\d.]+) \| ([\d.]+) \|", (FOLDER / "README.md").read_text(), re.M
    )
    kinds = {"answer", "belongs", "find", "result", "section", "spans", "start", "subject"}
    assert {name for name, _, _ in rows} == kinds
    assert all(float(trained) < float(untrained) for _, untrained, trained in rows)
