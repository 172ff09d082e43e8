"""What a model with experts of its own takes, counted by hand from the published dimensions of switch-base-16."""

import io
from pathlib import Path

import pytest
from bench_records import run, write
from rich.console import Console

from fedloom.bench.costs import budget_table
from fedloom.bench.dry import SUSTAINED, dry_table, forecast
from fedloom.bench.results import load_results
from fedloom.bench.suite import Cell, load_suite
from fedloom.budget import budget
from fedloom.config import parse_config
from fedloom.errors import ConfigError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
WIDTH, INNER, EXPERTS, SPARSE, VOCABULARY = 768, 3072, 16, 12, 32128
EXPERT = 2 * WIDTH * INNER
ATTENTION = (12 + 2 * 12) * 4 * WIDTH * 12 * 64  # encoder, decoder, and the decoder's look at the encoder
# Feed-forward layers in every other block, routers, embeddings, norms of blocks and of both stacks, relative positions.
REST = SPARSE * EXPERT + SPARSE * EXPERTS * WIDTH + VOCABULARY * WIDTH + (12 * 2 + 12 * 3 + 2) * WIDTH + 2 * 32 * 12

MODEL = SPARSE * EXPERTS * EXPERT + ATTENTION + REST


def cell(native="full", task="ag_news", method=None, label="fedavg_moe", rounds=2, **training):
    plain = {
        "method": method or {"name": "fedavg_moe"},
        "backbone": {"name": "google/switch-base-16"},
        "data": {
            "benchmark": {"tasks": [task], "clients": 10, "train": 1000, "skew": "label"},
            "max_length": 100,
        },
        "adapter": {"native": native, "rank": 4},
        "federation": {"rounds": rounds},
        "training": {"steps": 100_000, "epochs": 3, "batch_size": 8, **training},
    }
    return Cell("x", label, "FedAvg", parse_config(plain))


def printed(cells, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(dry_table(cells))
    return [line.strip() for line in console.export_text().splitlines()]


def test_every_parameter_is_trained():
    found = budget("switch-base-16", "fcmoe", 4)
    assert (found.experts, found.rank, found.lora) == (16, 0, SPARSE * EXPERTS * EXPERT)
    assert found.total == found.backbone_parameters == SPARSE * EXPERTS * EXPERT + ATTENTION + REST
    assert found.router == found.total - found.lora
    assert (found.trained, found.up, found.down, found.probe) == (found.total, found.total, found.total, 0)


def test_a_method_for_native_experts_needs_some():
    with pytest.raises(ConfigError, match=r"FC-MoE trains a model's own experts.*'llama'"):
        budget("llama-3.2-3b", "fcmoe", 4)


def test_a_method_of_lora_experts_points_to_one_for_native_experts():
    with pytest.raises(ConfigError, match=r"FedWeave trains LoRA experts.*'switch_transformers'.*--method fcmoe"):
        budget("switch-base-16", "fedweave", 4)


def test_forecast_of_whole_experts():
    """Rows of an epoch, not the ceiling of steps; a token meets one expert of sixteen; forward 2, backward 4."""
    found = forecast(cell())
    whole = SPARSE * EXPERTS * EXPERT + ATTENTION + REST
    assert (found.trainable, found.frozen) == (whole, 0)
    assert (found.up_bytes, found.down_bytes, found.probe_steps) == (4 * whole, 4 * whole, 0)
    assert found.total_bytes == 2 * 4 * whole * 10 * 2
    tokens = 2 * 3 * 1000 * 100
    met = whole - SPARSE * (EXPERTS - 1) * EXPERT
    assert found.hours == pytest.approx(6 * met * tokens / SUSTAINED / 3600)
    few = forecast(cell(steps=5))  # five steps of each of ten clients are fewer than three epochs
    assert few.hours == pytest.approx(found.hours * 5 * 8 * 10 / 3000)


def test_a_forecast_holds_pfl_moes_own_heads_and_gates():
    """A pass over a client's rows takes what a training step takes, and the own head beside it, of one round of two.

    Of 1,000 rows every fourth of a client is its gate's, rounded down for each of ten clients.
    """
    plain = forecast(cell())
    options = {"name": "pfl_moe", "after": 1, "head_epochs": 20, "gate_epochs": 30}
    found = forecast(cell(method=options))
    met = MODEL - SPARSE * (EXPERTS - 1) * EXPERT
    passes = 20 * (1000 - (250 - 10)) + 30 * 250
    more = (6 * met + 6 * VOCABULARY * WIDTH) * passes * 100
    assert found.hours - plain.hours == pytest.approx(more / SUSTAINED / 3600)
    assert found.memory - plain.memory == 16 * VOCABULARY * WIDTH
    assert (found.up_bytes, found.down_bytes, found.total_bytes) == (
        plain.up_bytes,
        plain.down_bytes,
        plain.total_bytes,
    )


def test_a_forecast_holds_fedmoes_capacity_and_its_probe():
    """Half of the experts go down and up; before, the whole model goes down to all ten, which count by a forward."""
    plain, found = forecast(cell()), forecast(cell(method={"name": "fedmoe", "capacity": 0.5}))
    half = SPARSE * EXPERTS // 2 * EXPERT + ATTENTION + REST
    assert (found.trainable, found.frozen) == (half, MODEL - half)
    assert (found.up_bytes, found.down_bytes) == (4 * half, 4 * half)
    assert found.total_bytes == 2 * 4 * half * 10 * 2 + 4 * MODEL * 10
    assert found.memory == plain.memory  # all experts stay in the model that it trains
    met = MODEL - SPARSE * (EXPERTS - 1) * EXPERT
    assert found.hours - plain.hours == pytest.approx(2 * met * 1000 * 100 / SUSTAINED / 3600)
    least = forecast(cell(method={"name": "fedmoe", "capacity": 0.01}))  # one per layer
    assert least.trainable == SPARSE * EXPERT + ATTENTION + REST
    most = forecast(cell(method={"name": "fedmoe", "capacity": 0.5, "capacities": {"client_00": 1.0}}))
    assert most.trainable == MODEL


def test_the_same_method_on_two_tasks_stands_under_each():
    lines = [" ".join(line.split()[:2]) for line in printed([cell(), cell(task="mmlu"), cell()])]
    kept = [line for line in lines if line.startswith(("google", "FedAvg"))]
    assert kept == ["google/switch-base-16: ag_news", "FedAvg 2", "google/switch-base-16: mmlu", "FedAvg 1"]


def test_cells_that_need_other_amounts_are_summed_each(monkeypatch):
    """2, 2 and 200 rounds are 204 rounds, not 3 × 2; every configuration is looked at once, whatever its seeds."""
    cells = [cell(), cell(rounds=200), cell()]
    one, two = forecast(cells[0]), forecast(cells[1])
    assert two.total_bytes == 100 * one.total_bytes
    looked = []
    monkeypatch.setattr("fedloom.bench.dry.forecast", lambda c: looked.append(c) or (one, two)[len(looked) - 1])
    lines = printed(cells)
    rows = [line.split() for line in lines if line.startswith("FedAvg")]
    gigabytes = one.total_bytes / 1e9
    assert [row[1] for row in rows] == ["2", "1"]
    assert [row[-3] for row in rows] == [f"{gigabytes:,.2f}", f"{100 * gigabytes:,.2f}"]
    assert any(line.startswith(f"3 cells: {102 * gigabytes:,.1f} GB sent") for line in lines)
    assert looked == cells[:2]


def test_two_labels_with_one_title_stand_apart(monkeypatch):
    one = forecast(cell())
    monkeypatch.setattr("fedloom.bench.dry.forecast", lambda _: one)
    lines = printed([cell(), cell(label="again")], width=120)
    assert [line.split()[1] for line in lines if line.startswith("FedAvg (")] == ["(fedavg_moe)", "(again)"]


def test_forecast_of_loras_on_experts():
    found = forecast(cell("lora"))
    assert found.trainable == SPARSE * EXPERTS * (2 * 4 * (WIDTH + INNER) + WIDTH)  # routers are trained whole
    assert found.frozen == SPARSE * EXPERTS * EXPERT + ATTENTION + REST


def test_the_budget_table_counts_native_methods_on_their_own_backbone_only(tmp_path):
    runs = [run("fcmoe", backbone="switch-base-16", method="fcmoe"), run("fedit", backbone="tiny")]
    table = budget_table(load_results(write(tmp_path, runs)))
    pairs = [(row[0].text, row[1].text) for row in table.rows]
    assert ("switch-base-16", "FC-MoE") in pairs
    assert ("Llama-3.2-3B", "FedIT") in pairs
    assert [backbone for backbone, method in pairs if method == "FC-MoE"] == ["switch-base-16"]
    only = budget_table(load_results(write(tmp_path, runs[:1])))
    assert [(row[0].text, row[1].text) for row in only.rows] == [("switch-base-16", "FC-MoE")]
    assert "frozen backbone" in table.notes[0]
    assert not any("frozen backbone" in note for note in only.notes)  # all of it is trained


def test_the_suites_hold_the_papers_grid():
    """Three α, three seeds, three methods; three ablations at α = 0.1 only; the published setting."""
    for name, tasks in (("fcmoe-tiny", 1), ("fcmoe-paper", 2)):
        _, cells = load_suite(EXPERIMENTS / name / "suite.yaml")
        whole = [c for c in cells if not c.label.startswith("fcmoe_wo")]
        without = [c for c in cells if c.label.startswith("fcmoe_wo")]
        assert len(whole) == tasks * 3 * 3 * len({c.label for c in whole})
        assert len(without) == tasks * 3 * 3
        assert {c.config.data.benchmark.alpha for c in without} == {0.1}
        for c in cells:
            config = c.config
            assert (config.federation.rounds, config.training.epochs, config.data.benchmark.clients) == (25, 1, 10)
            assert config.data.benchmark.skew == "label"
        whole_model = 4 * budget(cells[0].config.backbone.name, "fcmoe", 4).total if name == "fcmoe-paper" else 0
        assert all(c.config.federation.max_reply_bytes > whole_model for c in cells)  # else no reply would be read
