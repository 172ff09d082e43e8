"""Teacher-forced loss against transformers, and what happens where there is nothing to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.adapters.state import initial_tensors, pick_expert, place_expert
from fedloom.backbones.loss import token_losses
from fedloom.data.tokenize import Encoded, collate
from fedloom.errors import AdapterError, DataError
from fedloom.evaluation.losses import example_losses, gates_for, loss_per_task, macro, routing_matrix
from fedloom.evaluation.scores import score_tasks
from fedloom.runtime.client import Rows, Workbench
from fedloom.types import AdapterSpec, Tensors
from small_world import SPEC, World, examples, random_tensors, rows, small_llama, small_tokenizer

SPEC3 = AdapterSpec(SPEC.targets, rank=2, alpha=6.0, experts=3, router_hidden=8)
TASKS = {"sums": rows(examples("sums", 5)), "shout": rows(examples("shout", 4))}


def task_loss(bench: Workbench, found: Rows, mode: str) -> tuple[float, int]:
    """Sum the examples' losses, each of which must be its own when it is alone in a batch."""
    sums, tokens = example_losses(bench, found, mode)
    return float(sums.sum()), int(tokens.sum())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def mixture(world: World) -> tuple[Workbench, Tensors]:
    """A mixture whose router has opinions."""
    tensors = random_tensors(initial_tensors(SPEC3, world.setup.shapes, 32, torch.Generator()), scale=0.3)
    world.bench.load(tensors, SPEC3)
    return world.bench, tensors


def transformers_loss(encoded: list[Encoded], model: Any) -> tuple[float, int]:
    """Return transformers' own loss on one padded batch with labels −100 on prompt and padding, as (sum, tokens)."""
    longest = max(len(e.ids) for e in encoded)
    ids = torch.tensor([[*e.ids, *[0] * (longest - len(e.ids))] for e in encoded])
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, e in enumerate(encoded):
        labels[row, e.prompt_length : len(e.ids)] = ids[row, e.prompt_length : len(e.ids)]
        mask[row, : len(e.ids)] = 1
    tokens = int((labels != -100).sum())
    return float(model(input_ids=ids, attention_mask=mask, labels=labels).loss.detach()) * tokens, tokens


def test_the_backbones_loss_is_transformers_own(world: World) -> None:
    for task in TASKS.values():
        total, tokens = task_loss(world.bench, task, "off")
        expected, count = transformers_loss(task.encoded, small_llama())
        assert tokens == count
        assert total == pytest.approx(expected, rel=1e-5)


def test_the_mixtures_loss_is_transformers_own_under_the_same_gates(mixture: tuple[Workbench, Tensors]) -> None:
    bench, _ = mixture
    found = {}
    for mode in ("soft", "top1", "top2"):
        gates = gates_for(bench, TASKS["sums"], mode)
        with bench.grafted.routing(gates):
            expected, tokens = transformers_loss(TASKS["sums"].encoded, bench.backbone.model)
        total, count = task_loss(bench, TASKS["sums"], mode)
        assert count == tokens
        assert total == pytest.approx(expected, rel=1e-5)
        found[mode] = total
    assert len(set(found.values())) == 3


def test_logits_are_computed_at_supervised_positions_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    logits = type(world.bench.backbone).logits

    def counted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(type(world.bench.backbone), "logits", counted)
    batch = collate(TASKS["sums"].encoded, 0)
    with world.bench.grafted.routing(None):
        losses = token_losses(world.bench.backbone, batch)
    responses = sum(len(e.ids) - e.prompt_length for e in TASKS["sums"].encoded)
    assert seen == [responses]
    assert losses.shape == (responses,)
    assert losses.dtype == torch.float32
    assert responses < batch.ids.numel() / 4


def test_losses_per_task_and_their_plain_mean(world: World) -> None:
    losses = loss_per_task(world.bench, TASKS, "off")
    sums = {name: transformers_loss(task.encoded, small_llama()) for name, task in TASKS.items()}
    means = {name: total / tokens for name, (total, tokens) in sums.items()}
    assert losses == pytest.approx(means | {"macro": sum(means.values()) / 2}, rel=1e-5)


def test_the_loss_does_not_depend_on_the_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding must not leak: one by one and all at once give the same sum."""
    one = [task_loss(world.bench, Rows([e]), "off") for e in TASKS["shout"].encoded]
    each = example_losses(world.bench, TASKS["shout"], "off")[0]
    assert each.tolist() == pytest.approx([total for total, _ in one], rel=1e-5)
    total, tokens = task_loss(world.bench, TASKS["shout"], "off")
    assert tokens == sum(n for _, n in one)
    assert total == pytest.approx(sum(t for t, _ in one), rel=1e-5)


MASKED = Rows([Encoded((65, 66, 67), 3, 0), Encoded((65, 66), 2, 1)])


def test_D4_a_set_whose_labels_are_all_masked_has_no_loss(world: World) -> None:
    losses = loss_per_task(world.bench, {"masked": MASKED, "sums": TASKS["sums"]}, "off")
    assert losses["masked"] is None
    assert losses["macro"] == losses["sums"]
    assert loss_per_task(world.bench, {"masked": MASKED}, "off") == {"masked": None, "macro": None}


def test_D4_one_masked_example_does_not_spoil_the_others(world: World) -> None:
    mixed = Rows([*TASKS["sums"].encoded, *MASKED.encoded])
    assert task_loss(world.bench, mixed, "off") == pytest.approx(task_loss(world.bench, TASKS["sums"], "off"), rel=1e-5)


def test_A2_an_empty_set_has_no_loss_and_no_score(world: World) -> None:
    losses = loss_per_task(world.bench, {"empty": Rows([]), "sums": TASKS["sums"]}, "top1")
    assert losses["empty"] is None
    assert losses["macro"] == losses["sums"]
    assert score_tasks(world.bench, {"empty": Rows([])}, {"empty": []}, "top1") == (
        {"empty": None, "macro": None},
        {"empty": []},
    )


def test_A2_no_example_at_all_is_a_clear_error(world: World) -> None:
    for tasks in ({}, {"a": Rows([]), "b": Rows([])}):
        with pytest.raises(DataError, match="there is no example to evaluate on"):
            loss_per_task(world.bench, tasks, "off")


def test_macro_by_hand() -> None:
    assert macro([1.0, None, 4.0]) == 2.5
    assert macro([None]) is None
    assert macro([]) is None


def test_routing_matrix_rows_sum_to_one_and_count_the_router(mixture: tuple[Workbench, Tensors]) -> None:
    bench, w = mixture
    matrix = routing_matrix(bench, TASKS | {"empty": Rows([])})
    assert matrix.keys() == TASKS.keys()
    for task, found in matrix.items():
        f = TASKS[task].features(bench).double()
        hidden = torch.nn.functional.gelu(f @ w["router/0.weight"].double().T + w["router/0.bias"])
        gates = (hidden @ w["router/2.weight"].double().T + w["router/2.bias"]).softmax(1)
        assert found["gate"] == pytest.approx(gates.mean(0).tolist(), abs=1e-6)
        assert found["top1"] == [float((gates.argmax(1) == m).double().mean()) for m in range(3)]
        assert sum(found["gate"]) == pytest.approx(1, abs=1e-6)
        assert sum(found["top1"]) == pytest.approx(1, abs=1e-12)


def test_without_a_router_there_is_no_matrix_and_one_expert_takes_all(world: World) -> None:
    assert routing_matrix(world.bench, TASKS) == {}
    gates = gates_for(world.bench, TASKS["sums"], "soft")
    assert gates is not None
    assert gates.tolist() == [[1.0]] * 5
    assert gates_for(world.bench, TASKS["sums"], "off") is None


def test_several_experts_without_a_router_are_an_error(world: World) -> None:
    spec = AdapterSpec(SPEC.targets, rank=2, experts=2)
    world.bench.load(initial_tensors(spec, world.setup.shapes, 0, torch.Generator()), spec)
    with pytest.raises(AdapterError, match="2 experts without a router"):
        task_loss(world.bench, TASKS["sums"], "top1")


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_top1_of_one_expert_is_that_expert_as_plain_lora(
    expert: int, mixture: tuple[Workbench, Tensors], tmp_path: Path
) -> None:
    """Logits and loss of the mixture, with every example sent to one expert, against a graft of that expert alone."""
    bench, tensors = mixture
    alone = World(tmp_path / "alone", spec=AdapterSpec(SPEC.targets, rank=2, alpha=6.0)).bench
    one = place_expert(pick_expert(tensors, expert), 0)
    alone.load(one, alone.grafted.spec)
    # A router that always chooses this expert.
    bias = torch.full((3,), -50.0).index_fill(0, torch.tensor(expert), 50.0)
    bench.load(tensors | {"router/2.weight": torch.zeros(3, 8), "router/2.bias": bias}, SPEC3)
    ids = torch.tensor([[65, 66, 67, 68], [69, 70, 71, 72]])
    routing = bench.grafted.route(torch.randn(2, 32), "top1")
    assert routing is not None
    assert routing.tolist() == [expert, expert]
    with bench.grafted.routing(routing):
        mixed = bench.backbone.model(input_ids=ids).logits
    assert torch.equal(mixed, alone.backbone.model(input_ids=ids).logits)
    assert task_loss(bench, TASKS["sums"], "top1") == task_loss(alone, TASKS["sums"], "top1")


def test_scores_of_answers_that_are_known(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers replaced by texts: exact match up to case and space, mean, macro over two sets."""
    from fedloom.evaluation import scores as module

    answers = {5: ["0", " 8 ", "16", "wrong", ""], 4: ["yes", "YES YES", "no", "YES"]}
    tokenizer = small_tokenizer()

    def canned(bench: Any, prompts: Any, *args: Any, **kwargs: Any) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers[len(prompts)]]

    monkeypatch.setattr(module, "greedy", canned)
    means, each = score_tasks(world.bench, TASKS, {"sums": examples("sums", 5), "shout": examples("shout", 4)}, "top1")
    assert each == {"sums": [1, 1, 1, 0, 0], "shout": [1, 1, 0, 0]}
    assert means == {"sums": 0.6, "shout": 0.5, "macro": pytest.approx(0.55)}
