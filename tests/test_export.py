"""The model folder: what stands in it, that PEFT reads it, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file

from fedloom.adapters.state import initial_tensors
from fedloom.backbones.load import load_backbone
from fedloom.data.tokenize import encode_prompt, end_token_id
from fedloom.errors import ConfigError, FedloomError, ModelFolderError
from fedloom.evaluation.generate import greedy
from fedloom.export import save_model
from fedloom.model import LoadedModel, evaluate_files, load_model
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec, Tensors, View
from small_world import SPEC, World, random_tensors, save_backbone, small_backbone, small_llama, tree

SPEC3 = AdapterSpec(SPEC.targets, rank=2, alpha=6.0, dropout=0.05, experts=3, router_hidden=8)
IDS = torch.tensor([[72, 101, 108, 108, 111, 32, 119]])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def bench(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workbench, Tensors]:
    made = Workbench(load_backbone(str(backbone)), SPEC, None)
    shapes = World(tmp_path_factory.mktemp("world")).setup.shapes
    tensors = random_tensors(initial_tensors(SPEC3, shapes, 32, torch.Generator()), scale=0.3)
    made.load(tensors, SPEC3)
    return made, tensors


def save(folder: Path, bench: tuple[Workbench, Tensors], **more: Any) -> Path:
    workbench, tensors = bench
    more = {"provenance": {"rounds": 3, "seed": 42}, "experts": [{"examples": m} for m in range(3)]} | more
    save_model(folder, View(tensors, SPEC3), workbench, **more)
    return folder


@pytest.fixture
def folder(bench: tuple[Workbench, Tensors], tmp_path: Path) -> Path:
    return save(tmp_path / "model", bench)


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny", "tiny (comes with fedloom)"),  # no valid name on a hub, so none is asked for it
        ("org/model", "org/model"),
    ],
)
def test_an_adapter_names_its_base_as_others_know_it(
    name: str, known_as: str, bench: tuple[Workbench, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench[0].backbone, "name", name)
    folder = save(tmp_path / "model", bench)
    fields = json.loads((folder / "experts" / "0" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == known_as
    assert json.loads((folder / "fedloom.json").read_text())["backbone"]["name"] == name
    if name == "tiny":
        with pytest.raises(OSError, match=r"tiny \(comes with fedloom\)"):
            AutoPeftModelForCausalLM.from_pretrained(folder / "experts" / "0")


def test_the_layout(folder: Path, bench: tuple[Workbench, Tensors], backbone: Path) -> None:
    adapters = {
        f"experts/{m}/{name}" for m in range(3) for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert tree(folder).keys() == adapters | {"router.safetensors", "fedloom.json"}
    about = json.loads((folder / "fedloom.json").read_text())
    assert about["format"] == 1
    assert about["backbone"]["name"] == str(backbone)
    assert about["backbone"]["hash"] == bench[0].backbone.hash
    assert about["backbone"]["hidden_size"] == 32
    assert about["adapter"] == SPEC3.to_plain()
    assert about["routing"] == "top1"
    assert about["router"]["hidden"] == 8
    assert about["experts"] == [{"examples": 0}, {"examples": 1}, {"examples": 2}]
    assert about["provenance"] == {"rounds": 3, "seed": 42}
    router = load_file(folder / "router.safetensors")
    assert {f"router/{n}" for n in router} == {n for n in bench[1] if n.startswith("router/")}
    assert all(torch.equal(t, bench[1][f"router/{n}"]) for n, t in router.items())
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in folder.rglob("*"))


def test_one_expert_has_no_router(bench: tuple[Workbench, Tensors], tmp_path: Path) -> None:
    workbench, tensors = bench
    one = {n: t for n, t in tensors.items() if n.startswith("experts/0/")}
    save_model(tmp_path / "one", View(one, SPEC), workbench, provenance={})
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["experts", "fedloom.json"]
    about = json.loads((tmp_path / "one" / "fedloom.json").read_text())
    assert about["router"] is None
    assert about["experts"] == [{}]
    loaded = load_model(tmp_path / "one")
    assert torch.equal(loaded.gates(["x", "y"]), torch.ones(2, 1))
    for mode in ("top1", "soft"):
        assert loaded.generate("hello", routing=mode, max_new_tokens=4) == loaded.generate("hello", max_new_tokens=4)


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_M8_peft_reads_each_expert_offline_and_computes_what_we_compute(
    expert: int, folder: Path, bench: tuple[Workbench, Tensors]
) -> None:
    peft = PeftModel.from_pretrained(small_llama(), folder / "experts" / str(expert)).eval()
    workbench, tensors = bench
    workbench.load(tensors, SPEC3)
    workbench.grafted.eval()
    with torch.no_grad():
        with workbench.grafted.routing(torch.tensor([expert])):
            ours = workbench.backbone.model(input_ids=IDS).logits
        with workbench.grafted.routing(None):
            bare = workbench.backbone.model(input_ids=IDS).logits
        theirs = peft(input_ids=IDS).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert (ours - bare).abs().max() > 0.1


def test_what_was_saved_is_what_is_loaded(folder: Path, bench: tuple[Workbench, Tensors]) -> None:
    found = load_model(folder)
    read = found.bench.grafted.read()
    assert read.keys() == bench[1].keys()
    assert all(torch.equal(t, bench[1][n]) for n, t in read.items())
    assert found.bench.grafted.spec == SPEC3
    assert found.routing == "top1"


def test_half_precision_rounds_what_a_model_of_that_type_rounds(
    folder: Path, backbone: Path, bench: tuple[Workbench, Tensors]
) -> None:
    """Its parameters, not the frequencies of its rotary embedding, which ``transformers`` computes in float32."""
    loaded = load_model(folder, dtype="bfloat16", device="cpu").bench
    other = Workbench(load_backbone(str(backbone), dtype="bfloat16", device="cpu"), SPEC, None)
    other.load(bench[1], SPEC3)
    other.grafted.eval()
    ids = torch.arange(200)[None] % 250
    found = []
    for each in (loaded, other):
        with torch.no_grad(), each.grafted.routing(torch.tensor([1])):
            found.append(each.backbone.model(input_ids=ids).logits)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)


def test_generate_is_greedy_on_the_templated_prompt(folder: Path, bench: tuple[Workbench, Tensors]) -> None:
    model, (workbench, tensors) = load_model(folder), bench
    prompts = ["what is 3+4?", "shout it", "x"]
    tokenizer = workbench.backbone.tokenizer
    ids = [encode_prompt([("user", p)], tokenizer) for p in prompts]
    workbench.load(tensors, SPEC3)
    plain = [f"### Instruction:\n{p}\n\n### Response:\n" for p in prompts]  # this tokenizer has no chat template
    assert ids == tokenizer(plain)["input_ids"]
    for mode in ("top1", "top2", "soft", "off"):
        gates = model.bench.grafted.route(_features(model, ids), mode)
        expected = greedy(workbench, ids, gates, 8, [end_token_id(tokenizer)])
        texts = [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in expected]
        assert model.generate(prompts, routing=mode, max_new_tokens=8) == texts
        assert model.generate(prompts[0], routing=mode, max_new_tokens=8) == texts[0]
    assert model.generate(prompts, max_new_tokens=8) == model.generate(prompts, routing="top1", max_new_tokens=8)


def _features(model: LoadedModel, ids: list[list[int]]) -> torch.Tensor:
    """Return the plain mean of the bare backbone's last hidden states, one prompt at a time."""
    bare = small_llama()
    return torch.stack([bare.model(input_ids=torch.tensor([i])).last_hidden_state[0].mean(0) for i in ids])


def test_gates_are_the_routers_softmax(folder: Path, bench: tuple[Workbench, Tensors]) -> None:
    model, w = load_model(folder), bench[1]
    prompts = ["what is 3+4?", "shout it"]
    f = _features(model, [encode_prompt([("user", p)], model.bench.backbone.tokenizer) for p in prompts])
    hidden = torch.nn.functional.gelu(f @ w["router/0.weight"].T + w["router/0.bias"])
    expected = (hidden @ w["router/2.weight"].T + w["router/2.bias"]).softmax(1)
    assert torch.allclose(model.gates(prompts), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("", "is empty"), ("  \n", "is empty"), ("ab\udcffc", "is not valid UTF-8, at character 3")],
)
def test_a_prompt_without_text_is_refused(prompt: str, says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"the prompt {says}"):
        load_model(folder).generate(prompt)


def test_no_task_is_named_as_the_mean_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'macro' cannot name a task"):
        evaluate_files(folder, {"macro": "rows.jsonl"})


def test_a_model_with_experts_of_its_own_has_no_gates_for_a_prompt() -> None:
    workbench = Workbench(small_backbone(native=True), AdapterSpec((), native="full"), None)
    with pytest.raises(ConfigError, match="for each token"):
        LoadedModel({"routing": "top1"}, workbench).gates(["x"])


def test_a_model_that_routes_each_token_has_no_gates_for_a_prompt() -> None:
    spec = AdapterSpec(SPEC.targets, rank=2, alpha=6.0, experts=2, slots=(0, 1))
    model = LoadedModel({"routing": "soft"}, Workbench(small_backbone(), spec, None))
    assert not model.has_gates
    with pytest.raises(ConfigError, match="weighs its experts in each layer for each token"):
        model.gates(["x"])


def test_an_unknown_routing_is_refused(folder: Path) -> None:
    with pytest.raises(FedloomError, match="Unknown routing 'best'"):
        load_model(folder).generate("x", routing="best")


# --- Saving twice ---------------------------------------------------------------------------------------------------


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(
    folder: Path, bench: tuple[Workbench, Tensors]
) -> None:
    first = tree(folder)
    (folder / "stray.txt").write_text("old")
    save(folder, bench)
    assert tree(folder) == first
    workbench, tensors = bench
    one = {n: t for n, t in tensors.items() if n.startswith("experts/0/")}
    save_model(folder, View(one, SPEC), workbench, provenance={})
    assert not (folder / "router.safetensors").exists()
    assert [p.name for p in (folder / "experts").iterdir()] == ["0"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_failure_while_saving_leaves_the_old_folder(
    folder: Path, bench: tuple[Workbench, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom import export

    before = tree(folder)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("save_expert", "write_atomic", "write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(export, name, lambda *a, **k: full())
            with pytest.raises(OSError, match="No space"):
                save(folder, bench)
        assert tree(folder) == before
        assert [p.name for p in folder.parent.iterdir()] == [folder.name]


# --- What is refused ------------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        about = json.loads((folder / "fedloom.json").read_text())
        change(about)
        (folder / "fedloom.json").write_text(json.dumps(about))

    return apply


def pickled(folder: Path) -> None:
    weights = folder / "experts" / "1" / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    weights.with_suffix(".bin").write_bytes(pickle.dumps({"x": 1}))


def pickle_in_disguise(folder: Path) -> None:
    (folder / "router.safetensors").write_bytes(pickle.dumps({"x": 1}))


def unknown_kind(folder: Path) -> None:
    header = b'{"0.bias":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (folder / "router.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


def router_without_bias(folder: Path) -> None:
    router = load_file(folder / "router.safetensors")
    router.pop("2.bias")
    save_file(router, folder / "router.safetensors")


def other_rank(folder: Path) -> None:
    config = folder / "experts" / "0" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 4'))


def poisoned(name: str, value: float) -> Callable[[Path], None]:
    """Put one bad number into the last tensor of a file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / name)
        list(tensors.values())[-1].view(-1)[-1] = value
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return apply


def larger_than_its_files(folder: Path) -> None:
    """Promise 1024 experts of rank 4096, gigabytes, over files of three experts of rank 2."""
    edit(lambda a: a.update(experts=[{}] * 1024))(folder)
    edit(lambda a: a["adapter"].update(experts=1024, rank=4096, router_hidden=65536))(folder)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no description": (lambda f: (f / "fedloom.json").unlink(), "it has no fedloom.json"),
    "a broken description": (lambda f: (f / "fedloom.json").write_text("{"), "is not JSON"),
    "a list": (lambda f: (f / "fedloom.json").write_text("[]"), "has format None; this version of fedloom reads 1"),
    "another format": (edit(lambda a: a.update(format=2)), "has format 2; this version of fedloom reads 1"),
    "no adapter section": (edit(lambda a: a.pop("adapter")), "lacks adapter"),
    "another backbone": (edit(lambda a: a["backbone"].update(hash="0" * 64)), "with hash 000000000000"),
    "another tokenizer": (edit(lambda a: a["backbone"].update(tokenizer_hash="0")), "another tokenizer"),
    "no expert": (lambda f: shutil.rmtree(f / "experts" / "2"), r"experts/2.adapter_config.json does not exist"),
    "no weights": (lambda f: (f / "experts/1/adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "pickled weights": (pickled, "adapter_model.bin can run code and is not read"),
    "no router": (lambda f: (f / "router.safetensors").unlink(), "router.safetensors cannot be read"),
    "a pickle for a router": (pickle_in_disguise, "router.safetensors cannot be read"),
    "half a router": (router_without_bias, "missing: router/2.bias"),
    "NaN in an expert": (
        poisoned("experts/1/adapter_model.safetensors", float("nan")),
        "'experts/1/model.*lora_[AB]' holds NaN or infinity",
    ),
    "infinity in the router": (
        poisoned("router.safetensors", float("-inf")),
        "'router/.*' holds NaN or infinity",
    ),
    "a very deep description of an expert": (
        lambda f: (f / "experts/0/adapter_config.json").write_text("[" * 100_000),
        "adapter_config.json is not JSON: maximum recursion depth",
    ),
    "more than its files hold": (larger_than_its_files, "says 4096"),
    "a tensor of an unknown kind": (unknown_kind, "router.safetensors cannot be read"),
    "an expert of another rank": (other_rank, "wrong shape"),
    "alpha of another run": (
        edit(lambda a: a["adapter"].update(alpha=32.0)),
        "alpha 6.0, but fedloom.json says 2 and 32",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_grafted(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, message = REFUSED[fault]
    spoil(folder)
    monkeypatch.setattr("fedloom.model.Workbench", None)
    with pytest.raises(FedloomError, match=message):
        load_model(folder)


def test_the_wrong_backbone_is_refused_and_the_right_one_can_be_given(
    folder: Path, tmp_path: Path, backbone: Path
) -> None:
    other = save_backbone(tmp_path / "other", seed=8)
    with pytest.raises(ModelFolderError, match=r"hash .*Give the right one with --backbone"):
        load_model(folder, backbone=str(other))
    moved = shutil.copytree(backbone, tmp_path / "moved")
    edit(lambda a: a["backbone"].update(name="/gone/elsewhere"))(folder)
    with pytest.raises(FedloomError, match="/gone/elsewhere"):
        load_model(folder)
    assert load_model(folder, backbone=str(moved)).generate("x", max_new_tokens=2)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is not a fedloom model"):
        load_model(tmp_path / "none")


@pytest.mark.parametrize("inside", ["model", "models/ann"])
def test_a_runs_folder_in_place_of_its_model_is_told(inside: str, tmp_path: Path) -> None:
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / "fedloom.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=rf"no fedloom\.json\. Did you mean {tmp_path / inside}\?"):
        load_model(tmp_path)


# --- Measuring ------------------------------------------------------------------------------------------------------


def test_evaluating_files_is_the_loss_of_transformers(
    folder: Path, bench: tuple[Workbench, Tensors], tmp_path: Path
) -> None:
    rows = [{"prompt": f"say {i}", "response": f"{i} it is"} for i in range(4)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate_files(folder, {"mine": file}, routing="off", generate=False)
    tokenizer, model = bench[0].backbone.tokenizer, small_llama()
    total, tokens = 0.0, 0
    for row in rows:
        prompt = encode_prompt([("user", row["prompt"])], tokenizer)
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss
        total, tokens = total + float(loss) * len(answer), tokens + len(answer)
    assert found["loss"]["mine"] == pytest.approx(total / tokens, rel=1e-5)
    assert found["examples"] == {"mine": 4}
    assert evaluate_files(folder, {"mine": file}, generate=False)["loss"]["mine"] != found["loss"]["mine"]
