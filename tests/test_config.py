"""Configuration: what is wrong is said in a way that a person can mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.config import Config, load_config, parse_config
from fedloom.errors import ConfigError
from fedloom.methods.fedit import FedIT
from fedloom.methods.fedweave import FedWeave
from fedloom.types import Training

DATA = {"clients": {"ann": "ann.jsonl"}, "test": {"gsm8k": "test.jsonl"}}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, yaml.safe_dump({"seed": 1, "data": DATA}))


def test_defaults_are_the_papers() -> None:
    """FedWeave, Section 4.1 and Appendix A."""
    config = parse_config({"data": DATA})
    assert config.build_method().title == "FedWeave"
    assert config.training.ordered() == Training(10, 8, 1e-4, 5e-5, 0.0, 1.0, "reset")
    assert (config.federation.rounds, config.federation.participation) == (20, 1.0)
    assert (config.adapter.alpha, config.adapter.dropout, config.adapter.rank) == (16.0, 0.05, None)
    assert config.data.max_length == 512
    method = config.build_method()
    assert isinstance(method, FedWeave)
    assert method.default_rank == 8
    assert FedIT.default_rank == 32
    options = method.options
    assert (options.clusterer, options.max_buckets, options.restarts) == ("kmeans", 8, 10)
    assert (options.warmup_steps, options.warmup_batch) == (10, 8)
    assert (options.linkage, options.max_experts, options.router_hidden) == ("average", 8, 512)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"warmup_steps": 3}, r"unknown key 'warmup_steps'\. Did you mean 'method\.warmup_steps'"),
        ({"trainign": {}}, r"unknown key 'trainign'\. Did you mean 'training'\?"),
        ({"training": {"learning_rate": 1}}, r"unknown key 'training\.learning_rate'\."),
        ({"training": {"batchsize": 1}}, r"unknown key 'training\.batchsize'\. Did you mean 'batch_size'\?"),
        ({"training": {"step": 1}}, r"unknown key 'training\.step'\. Did you mean 'steps'\?"),
        ({"adapter": {"ranks": 8}}, r"unknown key 'adapter\.ranks'\. Did you mean 'rank'\?"),
        ({"federation": {"round": 1}}, r"unknown key 'federation\.round'\. Did you mean 'rounds'\?"),
        ({"server": {"optimiser": "fedavgm"}}, r"unknown key 'server\.optimiser'\. Did you mean 'optimizer'\?"),
        ({"privacy": {"clip": 1, "nose": 1}}, r"unknown key 'privacy\.nose'\. Did you mean 'noise' or 'probe_noise'\?"),
        ({"secagg": {"treshold": 0.9}}, r"unknown key 'secagg\.treshold'\. Did you mean 'threshold'\?"),
        ({"backbone": {"nmae": "tiny"}}, r"unknown key 'backbone\.nmae'\. Did you mean 'name'\?"),
        ({"data": DATA | {"max_len": 1}}, r"unknown key 'data\.max_len'\. Did you mean 'max_length'\?"),
        ({"data": {"benchmark": {"tasks": ["gsm8k"], "alfa": 1}}}, r"'data\.benchmark\.alfa'\. Did you mean 'alpha'"),
        (
            {"method": {"name": "fedweave", "clusterr": 1}},
            r"unknown key 'method\.clusterr'\. Did you mean 'clusterer'\?",
        ),
        ({"method": {"name": "fedit", "clusterer": "kmeans"}}, r"unknown key 'method\.clusterer'"),
        ({"method": {"name": "fedweeve"}}, r"unknown method 'fedweeve'\. Did you mean 'fedweave'"),
        ({"method": {"name": "zzz"}}, r"unknown method 'zzz'\. Known: centralised"),
        ({"method": "fedweave"}, r"'method' is 'fedweave': .* section, method: \{name: fedweave\}\."),
        ({"data": "a.jsonl"}, r"'data' is 'a\.jsonl': .* section, data: \{benchmark: …\}\."),
        ({"data": {"clients": "a.jsonl"}}, r"'data\.clients' is .* each value, clients: \{NAME: a\.jsonl\}\."),
        ({"data": {"clients": {2024: "a.jsonl"}}}, r"a name in 'data\.clients' is 2024, .*Put it in quotes"),
        ({"data": {"clients": {False: "a.jsonl"}}}, r"a name in 'data\.clients' is False, .*YAML reads no"),
        ({"method": "fedweave", "trainign": {}}, r"unknown key 'trainign'"),
        ({"method": {"name": ["fedit"], "trainign": {}}}, r"'method\.name' is \['fedit'\]"),
        (
            {"method": {"name": "fedweave", "max_experts": 0}},
            r"'method\.max_experts' is 0: .*greater than or equal to 1",
        ),
        ({"method": {"name": "fedweave", "clusterer": "dbscan"}}, r"'method\.clusterer' is 'dbscan': .*'kmeans'"),
        ({"training": {"lr": -1}}, r"'training\.lr' is -1: .*greater than or equal to 0"),
        ({"training": {"lr": float("nan")}}, r"'training\.lr' is nan"),
        ({"training": {"lr": float("inf")}}, r"'training\.lr' is inf"),
        ({"training": {"steps": 0}}, r"'training\.steps' is 0"),
        ({"training": {"steps": 2.5}}, r"'training\.steps' is 2\.5"),
        ({"training": {"optimizer_state": "drop"}}, r"'training\.optimizer_state' is 'drop': .*'reset' or 'keep'"),
        (
            {"method": {"name": "fedrouter"}, "training": {"optimizer_state": "keep"}},
            r"optimizer_state keep .* FedRouter .*Use 'reset'",
        ),
        ({"training": None}, r"'training' is None: .* training: \{steps: …\}"),
        ({"federation": {"participation": 0}}, r"'federation\.participation' is 0"),
        ({"federation": {"participation": 1.5}}, r"'federation\.participation' is 1\.5"),
        ({"federation": {"norm_factor": float("inf")}}, r"'federation\.norm_factor' is inf"),
        ({"adapter": {"dropout": 1}}, r"'adapter\.dropout' is 1"),
        ({"evaluation": {"routing": ["top0"]}}, r"routing 'top0' is none of soft, top1"),
        ({"evaluation": {"routing": []}}, r"routing needs at least one"),
        ({"data": {}}, r"give either 'benchmark' or 'clients'"),
        ({"data": DATA | {"benchmark": {"tasks": ["gsm8k"]}}}, r"give either 'benchmark' or 'clients'"),
        ({"data": {"benchmark": {"tasks": []}}}, r"'data\.benchmark\.tasks' is \[\]"),
        ({"data": {"benchmark": {"clients": 3}}}, r"'data\.benchmark\.tasks' is missing"),
        ({"seed": "x"}, r"'seed' is 'x'"),
        ({"training": {"epochs": 3}}, r"'training' is .*epochs needs steps, the most that a client takes in a round"),
        ({"data": {"benchmark": {"tasks": ["gsm8k"]}, "test": {"a": "t.jsonl"}}}, r"'benchmark' draws .* leave 'test'"),
        ({"data": {"synthetic": {}, "test": {"a": "t.jsonl"}}}, r"'synthetic' draws its own test rows.* leave 'test'"),
        ({"evaluation": {"split": "validation"}}, r"evaluation\.split .*with data\.clients .*data\.test"),
        ({"evaluation": {"personalised_scores": True}}, r"personalised_scores scores .*personalised is 0"),
    ],
)
def test_what_is_wrong_is_named(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"data": DATA} | plain)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": DATA, "training": {"lr": -1, "step": 3}, "sead": 1})
    assert str(caught.value).count("\n") == 2


def test_missing_data_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'data' is missing"):
        parse_config({})


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", ("seed",), 7),
        ("training.lr=1e-3", ("training", "lr"), 1e-3),
        ("training.lr=0.001", ("training", "lr"), 1e-3),
        ("federation.rounds=3", ("federation", "rounds"), 3),
        ("method.name=fedit", ("method", "name"), "fedit"),
        ("evaluation.routing=[soft, top2]", ("evaluation", "routing"), ["soft", "top2"]),
        ("evaluation.generate=false", ("evaluation", "generate"), False),
        ("adapter.rank=null", ("adapter", "rank"), None),
        ("backbone.name=a=b", ("backbone", "name"), "a=b"),
    ],
)
def test_overrides(override: str, path: tuple[str, ...], value: object, file: Path) -> None:
    found: object = load_config(file, [override])
    for part in path:
        found = getattr(found, part)
    assert found == value


def test_overrides_reach_the_methods_options_and_the_last_one_wins(file: Path) -> None:
    method = load_config(file, ["method.warmup_steps=3", "method.warmup_steps=4"]).build_method()
    assert isinstance(method, FedWeave)
    assert method.options.warmup_steps == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "not of the form section.key=value"),
        ("=3", "not of the form section.key=value"),
        ("seed.x=3", "'seed' is not a section"),
        ("training.lr=[", "not valid YAML"),
        ("training.rate=3", "unknown key 'training.rate'"),
        ("trainign.lr=3", "unknown key 'trainign'. Did you mean 'training'?"),
        ("seed=", "'seed' is None"),
        ("data={clients: {a: b}, clients: {c: d}}", "not valid YAML"),
    ],
)
def test_bad_overrides(override: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert message in str(caught.value)


def test_an_override_of_an_empty_section(tmp_path: Path) -> None:
    path = write(tmp_path, "training:\ndata: {clients: {ann: a.jsonl}}\n")
    assert load_config(path, ["training.steps=3"]).training.steps == 3


def test_relative_files_are_relative_to_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    text = yaml.safe_dump(
        {"data": {"clients": {"a": "a.jsonl", "b": "/b.jsonl", "c": "~/c.jsonl"}, "test": {"t": "../t.jsonl"}}}
    )
    path = write(folder, text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in (path, Path("deep/er/run.yaml")):
        data = load_config(given).data
        assert Path(data.clients["a"]).resolve() == folder / "a.jsonl"
        assert data.clients["b"] == "/b.jsonl"
        assert data.clients["c"] == str(tmp_path / "c.jsonl")
        assert Path(data.test["t"]).resolve() == tmp_path / "deep" / "t.jsonl"
    bench = write(folder, "data: {benchmark: {tasks: [gsm8k], root: ../rows}}\n")
    found = load_config(bench).data.benchmark
    assert found is not None
    assert Path(str(found.root)).resolve() == tmp_path / "deep" / "rows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "must hold a mapping of sections"),
        (b"", "must hold a mapping of sections"),
        (b"a: [", "not valid YAML"),
        (b"seed: 1\ndata: \xff\xfe\n", "not valid YAML"),
        (b"a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        (b"a: \x00\n", "not valid YAML"),
        (b"1: 2\n", "'1'"),
        (b"seed: 1\nseed: 2\n", "the key 'seed' stands twice"),
        (b"? [seed]\n: 1\n", "not valid YAML.*unhashable key"),
        (b"data: {? {a: b} : c}\n", "not valid YAML.*unhashable key"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*directory"):
        load_config(tmp_path)


def test_what_is_written_down_is_what_was_read(file: Path, tmp_path: Path) -> None:
    """``config.yaml`` of a run starts the same run."""
    config = load_config(file, ["method.warmup_steps=3", "training.lr=1e-5"])
    again = tmp_path / "again" / "config.yaml"
    again.parent.mkdir()
    again.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    assert load_config(again) == config
    assert isinstance(config, Config)


def test_passes_and_the_most_steps_are_read_again_as_they_were_written(file: Path) -> None:
    training = load_config(file, ["training.epochs=3", "training.steps=500"]).training
    assert (training.ordered().steps_of(80), training.ordered().steps_of(8000)) == (30, 500)
    assert type(training).model_validate(training.model_dump()) == training


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"backbone": {"threads": 10**12}}, r"'backbone\.threads' is 1000000000000"),
        ({"training": {"lr": 1e300}}, r"'training\.lr' is 1e\+300"),
        ({"adapter": {"rank": 10**9}}, r"'adapter\.rank' is 1000000000"),
        ({"adapter": {"alpha": 1e308}}, r"'adapter\.alpha'"),
        ({"evaluation": {"routing": ["top" + "9" * 5000]}}, "routing"),
        ({"data": {"clients": {"a": "a.jsonl"}, "test": {"macro": "t.jsonl"}}}, "'macro' names the mean over tasks"),
        ({"method": {"name": "fedweave", "router_hidden": 10**9}}, r"'method\.router_hidden'"),
        ({"method": {"name": "ffa_lora"}, "server": {"aggregation": "product-svd"}}, "FFA-LoRA"),
    ],
)
def test_absurd_sizes_and_reserved_names_are_refused(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"data": {"clients": {"a": "a.jsonl"}}} | plain)


def test_a_path_of_nobody_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="~nobody-there"):
        parse_config({"data": {"clients": {"a": "~nobody-there/a.jsonl"}}}, base=tmp_path)
