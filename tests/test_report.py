"""The page says what the files say, to a person, from whatever names the data brings."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from fedloom.config import parse_config
from fedloom.errors import DataError
from fedloom.report import routing_figure, write_report
from fedloom.report.contents import standard_error
from fedloom.report.wording import change, duration, number, size, spans, visible
from fedloom.runtime.wire import encode_state
from fedloom.types import AdapterSpec, State

HOSTILE = "<script>alert('x')</script>\"&'"


class Page(HTMLParser):
    """Tables by id, every attribute, and all text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self._rows: list[list[str]] | None = None
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "table":
            self._rows = []
            if "id" in dict(attrs):
                self.tables[dict(attrs)["id"]] = self._rows
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag == "table":
            self._rows = None
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.text.append(data)
        if self._cell and self._rows:
            self._rows[-1][-1] += data

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]

    def row(self, table: str, *first: str) -> list[str]:
        """Return the row that begins so, without its beginning."""
        return next(r[len(first) :] for r in self.tables[table] if r[: len(first)] == list(first))


def exchange(number, losses, **more):
    sent = {"steps": 10, "tokens": 9, "examples": 30, "bytes_up": 1024, "bytes_down": 2048, "seconds": 2.0}
    clients = {name: {"loss": loss, **sent} for name, loss in losses.items()}
    totals = {"bytes_up": 1024 * len(losses), "bytes_down": 2048 * len(losses), "seconds": 4.5}
    return {"round": number, "clients": clients, "weights": {}, "quarantined": {}, "absent": [], **totals, **more}


def fedweave(a="math", b="style", client="site-a"):
    """A run of two rounds: two clients, two tasks, two experts; ``site-b`` is quarantined once and absent once."""
    before = {
        "loss": {a: 2.5, b: 3.5, "macro": 3.0},
        "loss_backbone": {a: 2.0, b: 4.0, "macro": 3.0},
        "score": {a: 0.125, b: 0.25, "macro": 0.1875},
    }
    first = exchange(1, {client: 2.75, "site-b": 9.0}, train_loss=2.75, cohort=[client, "site-b"])
    first["clients"]["site-b"]["examples"] = 0
    first["quarantined"] = {"site-b": "its tensor 'x' holds NaN"}
    second = exchange(2, {client: 1.8125}, train_loss=1.8125, absent=["site-b"])
    second["evaluation"] = {"loss": {a: 1.5, b: 4.2, "macro": 2.85}}
    probe = exchange(0, {client: None, "site-b": None}, train_loss=None, evaluation=before)
    for entry in probe["clients"].values():
        del entry["loss"]
    final = {
        mode: {
            "loss": {a: 1.5 + shift, b: 4.2 + shift, "macro": 2.85 + shift},
            "score": {a: 0.75 - shift, b: 0.5, "macro": 0.625},
            "each": {a: [1.0, 0.0, 1.0, 1.0], b: [0.5, 0.5]},
            "generation_seconds": seconds,
        }
        for mode, shift, seconds in (("top1", 0.0, 1.5), ("soft", 0.0625, 75.4))
    }
    audited = {"purity": 0.8125, "nmi": 0.5625, "ari": -0.0625}
    metrics = {
        "method": "fedweave",
        "seed": 43,
        "experts": 2,
        "routing": final,
        "routing_matrix": {a: {"gate": [0.9, 0.1], "top1": [1.0, 0.0]}, b: {"gate": [0.36, 0.64], "top1": [0.2, 0.8]}},
        "before": before,
        "alignment": {
            "local": audited,
            "global": {**audited, "purity": 0.75},
            "prototypes": audited,
            "clients": {
                client: {
                    "purity": 0.9,
                    "buckets": [
                        {"examples": 18, "expert": 1, "tasks": {a: 3, b: 15}},
                        {"examples": 12, "expert": 0, "tasks": {a: 12}},
                    ],
                },
                "site-b": {"purity": 1.0, "buckets": [{"examples": 30, "expert": 0, "tasks": {a: 30}}]},
            },
        },
        "seconds": 3725.0,
    }
    return {"metrics": metrics, "rounds": [probe, first, second], "config": {"method": {"name": "fedweave"}}}


def fedit():
    run = fedweave()
    run["config"]["method"]["name"] = run["metrics"]["method"] = "fedit"
    run["metrics"] |= {"experts": 1, "routing_matrix": {}, "alignment": None}
    del run["metrics"]["routing"]["soft"]
    run["rounds"][0] = {"round": 0, "evaluation": run["rounds"][0]["evaluation"]}
    return run


def without_tests(run):
    run = copy.deepcopy(run)
    for key in ("routing", "routing_matrix"):
        run["metrics"].pop(key, None)
    run["metrics"]["before"] = None
    for record in run["rounds"]:
        record.pop("evaluation", None)
    return run


def write(out, run):
    """Write a run folder as ``fedloom.experiment`` does."""
    names = ["site-a", "site-b", "site-c"]
    plain = {
        "seed": 43,
        "data": {"clients": {name: f"{name}.jsonl" for name in names}},
        "evaluation": {"routing": list(run["metrics"].get("routing", {"top1": None}))},
        **run["config"],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(yaml.safe_dump(parse_config(plain).model_dump()))
    manifest = {
        "fedloom": "0.1.0",
        "python": "3.11.7",
        "packages": {"torch": "2.8.0"},
        "machine": {"processor": "x86_64", "threads": 2, "cpu_capability": "AVX2", "gpu": None},
        "backbone": {"name": "tiny", "hash": "ab" * 32, "tokenizer_hash": "cd" * 32},
        "seed": 43,
        "data": {
            "clients": {"site-a": "site-a.jsonl", "site-b": "site-b.jsonl"},
            "rows": {
                "site-a": {"rows": 9, "kept": 6, "empty_response": 3},
                "site-b": {"rows": 4, "kept": 3, "empty_response": 1},
            },
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest | run.get("manifest", {})))
    (out / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run["rounds"]))
    (out / "metrics.json").write_text(json.dumps(run["metrics"]))
    return out


def page(out, run):
    return Page(write_report(write(out, run)).read_text())


@pytest.fixture(scope="module")
def fedweave_page(tmp_path_factory):
    return page(tmp_path_factory.mktemp("run"), fedweave())


class TestNumbers:
    def test_results(self, fedweave_page):
        # scores 1 0 1 1: mean 0.75, s² = 0.25, standard error √(0.25 / 4) = 0.25
        assert fedweave_page.row("results", "math") == [
            "2.0000", "2.5000", "1.5000", "−25.0\u2009%", "0.1250", "0.7500", "0.2500", "4",
        ]  # fmt: skip
        assert fedweave_page.row("results", "style") == [
            "4.0000", "3.5000", "4.2000", "+5.0\u2009%", "0.2500", "0.5000", "0.0000", "2",
        ]  # fmt: skip
        assert fedweave_page.row("results", "mean (macro)")[:4] == ["3.0000", "3.0000", "2.8500", "−5.0\u2009%"]

    def test_what_a_score_counts(self, fedweave_page):
        exact = "exact match up to case and white space, in at most 64 tokens"
        assert f"Score of math: {exact}; style: {exact}." in " ".join(fedweave_page.text)

    def test_routings(self, fedweave_page):
        assert fedweave_page.row("routings", "math") == ["1.5000", "1.5625", "0.7500", "0.6875"]
        times = fedweave_page.row("routings", "time to generate all answers")
        assert times == ["", "", "1.5 s", "1 min 15 s"]

    def test_routing_matrix(self, fedweave_page):
        text = " ".join(fedweave_page.text)
        for value in ("0.90", "0.10", "0.36", "0.64", "0.20", "0.80"):
            assert value in text

    def test_buckets_and_alignment(self, fedweave_page):
        assert fedweave_page.row("buckets", "site-a", "0") == ["E1", "18", "math 3, style 15"]
        assert fedweave_page.row("buckets", "site-b", "0") == ["E0", "30", "math 30"]
        assert "Bucket 0 → expert 1: 18 examples (style 15, math 3)" in fedweave_page.values("title")
        # the widest client has 30 examples, so 18 of them are 60 %
        assert "width:calc(60.00% - 2px)" in fedweave_page.values("style")
        assert fedweave_page.row("alignment", "global: experts, over all examples") == ["0.7500", "0.5625", "−0.0625"]

    def test_traffic_per_round_and_client(self, fedweave_page):
        # (examples, rounds counted, first loss, last loss, up, down, time): site-a answers the probe and two rounds
        assert fedweave_page.row("client-table", "site-a") == [
            "30", "2", "2.7500", "1.8125", "3 KiB", "6 KiB", "6 s",
        ]  # fmt: skip
        assert fedweave_page.row("client-table", "site-b") == ["30", "0", "–", "–", "2 KiB", "4 KiB", "4 s"]
        assert fedweave_page.row("round-table", "1") == ["1", "2.7500", "–", "2 KiB", "4 KiB", "4.5 s"]
        assert fedweave_page.row("round-table", "2") == ["1", "1.8125", "2.8500", "1 KiB", "2 KiB", "4.5 s"]
        assert "5 KiB up, 10 KiB down" in fedweave_page.text

    def test_who_was_missing(self, fedweave_page):
        assert fedweave_page.tables["troubles"][1:] == [
            ["site-b", "2", "Absent: it was asked and did not answer."],
            ["site-b", "1", "Quarantined: its tensor 'x' holds NaN."],
            ["site-c", "all", "Left out: it has no usable example, or was never sampled."],
        ]

    def test_facts(self, fedweave_page):
        text = fedweave_page.text
        for fact in ("ab" * 32, "cd" * 32, "2.8.0", "x86_64, AVX2, 2 threads", "1 h 2 min", "4 empty response"):
            assert fact in text, fact
        assert "rank 8, alpha 16" in text  # rank null: FedWeave's own


class TestKindsOfRun:
    def test_fedit_leaves_out_routing_and_buckets_with_a_sentence(self, tmp_path):
        found = page(tmp_path, fedit())
        assert not {"routings", "buckets", "alignment"} & found.tables.keys()
        text = " ".join(found.text)
        assert "FedIT trains one shared adapter. There is no router" in text
        assert "does not sort examples into buckets" in text
        assert "--explain" not in text
        assert found.row("round-table", "0") == ["–", "–", "3.0000", "–", "–", "–"]

    @pytest.mark.parametrize(("slots", "routed"), [((), True), ((0, 1, 1), False)])
    def test_gates_are_offered_where_a_prompt_has_them(self, tmp_path, slots, routed):
        (tmp_path / "model").mkdir()
        spec = AdapterSpec(("q_proj",), experts=2, slots=slots)
        (tmp_path / "model" / "fedloom.json").write_text(json.dumps({"adapter": spec.to_plain()}))
        text = " ".join(page(tmp_path, fedweave()).text)
        assert ("--explain" in text) is routed
        assert ("with top1 routing" in text) is routed

    @pytest.mark.parametrize("make", [fedweave, fedit])
    def test_without_test_sets(self, tmp_path, make):
        found = page(tmp_path, without_tests(make()))
        assert "This run had no test sets" in " ".join(found.text)
        assert "results" not in found.tables
        assert found.row("round-table", "2")[1:3] == ["1.8125", "–"]

    @pytest.mark.parametrize("make", [fedweave, fedit, lambda: without_tests(fedit())])
    def test_without_rounds(self, tmp_path, make):
        run = make()
        del run["rounds"][1:]
        found = page(tmp_path, run)
        text = " ".join(found.text)
        assert "No round was run" in text
        assert "There is no training loss to show: the run had no round." in text

    def test_buckets_without_labels_come_from_the_checkpoint(self, tmp_path):
        run = fedweave()
        run["metrics"]["alignment"] = None
        values = {"assignment": {"site-a": [1, 0], "site-b": [0]}, "sizes": {"site-a": [20, 10], "site-b": [7]}}
        for rounds, state_values in ((1, {"assignment": {}, "sizes": {}}), (2, values)):
            folder = tmp_path / "checkpoints" / f"round-{rounds:06d}"
            folder.mkdir(parents=True)
            state = State(rounds, {}, AdapterSpec(("q_proj",), experts=2), state_values)
            (folder / "state.safetensors").write_bytes(encode_state(state))
        found = page(tmp_path, run)
        assert found.row("buckets", "site-a", "0") == ["E1", "20"]
        assert found.row("buckets", "site-b", "0") == ["E0", "7"]
        assert "purity could not be checked" in " ".join(found.text)

    def test_numbers_that_are_missing_or_not_finite(self, tmp_path):
        run = fedweave()
        run["metrics"]["routing"]["top1"]["loss"]["math"] = None
        run["rounds"][1]["clients"]["site-a"]["loss"] = run["rounds"][1]["train_loss"] = float("nan")
        found = page(tmp_path, run)
        assert found.row("results", "math")[2:4] == ["–", ""]
        assert found.row("round-table", "1")[1] == "not finite"


class TestSafety:
    def test_hostile_names_stay_text(self, tmp_path):
        run = fedweave(a=HOSTILE, b="$\\frac{$ \u202e\x00", client=HOSTILE)
        run["rounds"][1]["quarantined"] = {"site-b": HOSTILE}
        run["manifest"] = {"backbone": {"name": HOSTILE, "hash": HOSTILE, "tokenizer_hash": "cd"}}
        found = page(tmp_path / "a run's <b>", run)
        assert not {"script", "b>"} & set(found.tags)
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert found.row("results", HOSTILE)[0] == "2.0000"
        assert found.row("client-table", HOSTILE)[0] == "30"
        assert f"Quarantined: {HOSTILE}." in [row[2] for row in found.tables["troubles"]]
        assert "$\\frac{$ \ufffd\ufffd" in [row[0] for row in found.tables["results"]]

    @pytest.mark.parametrize("make", [fedweave, fedit])
    def test_nothing_from_elsewhere(self, tmp_path, make):
        html = write_report(write(tmp_path, make())).read_text()
        assert not re.findall(r"https?:|//\w|@import|<script|<link|<img|<iframe", html)
        addresses = [v for k, v in Page(html).attributes if k in ("href", "src")]
        assert all(a.startswith("#") for a in addresses)
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))

    def test_element_names_are_unique_and_every_reference_meets_one(self, tmp_path):
        found = page(tmp_path, fedweave())
        names = found.values("id")
        assert len(names) == len(set(names))
        used = (
            [a[1:] for a in found.values("href")] + found.values("aria-labelledby") + found.values("aria-describedby")
        )
        assert set(used) <= set(names)

    def test_figures_are_named_text_in_the_colours_of_the_page(self, tmp_path):
        html = write_report(write(tmp_path, fedweave())).read_text()
        figures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
        assert len(figures) == 4  # two tasks, training, traffic
        for figure in figures:
            assert re.search(r'role="img" aria-label="[^"]+"><title>[^<]+</title>', figure)
            assert re.search(r"<text[^>]*>round</text>", figure)
            assert not re.search(r"#0[1-9]0", figure)  # no stand-in colour is left
        assert "Loss of math: 2.500 at round 0, 1.500 at round 2." in html

    def test_same_run_same_bytes(self, tmp_path):
        out = write(tmp_path, fedweave())
        first = write_report(out).read_bytes()
        assert write_report(out).read_bytes() == first
        assert sorted(p.name for p in out.iterdir()) == [
            "config.yaml", "manifest.json", "metrics.json", "report.html", "rounds.jsonl",
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "rounds.jsonl", "metrics.json"])
    def test_a_missing_or_damaged_file_is_named(self, tmp_path, name):
        out = write(tmp_path, fedweave())
        (out / name).write_text("{")
        with pytest.raises(DataError, match=name):
            write_report(out)
        (out / name).unlink()
        with pytest.raises(DataError, match=f"cannot read .*{name}: No such file"):
            write_report(out)


class TestRoutingFigure:
    def test_every_cell_has_its_number(self, tmp_path):
        out = write(tmp_path / "run", fedweave(a="$x^{", b=HOSTILE))
        svg = routing_figure(out, tmp_path / "routing.svg").read_text()
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert texts.count("E0") == texts.count("E1") == 2
        for value in ("0.90", "0.10", "0.36", "0.64", "1.00", "0.00", "0.20", "0.80", "$x^{"):
            assert value in texts, value
        assert "<script" not in svg

    @pytest.mark.parametrize("kind", ["svg", "png"])
    def test_same_run_same_bytes(self, tmp_path, kind):
        out = write(tmp_path / "run", fedweave())
        first, second = (routing_figure(out, tmp_path / f"{i}.{kind}").read_bytes() for i in range(2))
        assert first == second
        assert first.startswith(b"\x89PNG" if kind == "png" else b"<?xml")

    def test_refuses_what_it_cannot_draw(self, tmp_path):
        with pytest.raises(DataError, match="no router"):
            routing_figure(write(tmp_path / "a", fedit()), tmp_path / "x.svg")
        with pytest.raises(DataError, match=r"\.svg or \.png"):
            routing_figure(write(tmp_path / "b", fedweave()), tmp_path / "x.pdf")


class TestWording:
    def test_numbers(self):
        assert [number(v, 2) for v in (None, -0.5, 1 / 3, float("inf"))] == ["–", "−0.50", "0.33", "not finite"]
        assert [size(v) for v in (0, 1023, 1536, 104857600, 3 * 2**40)] == [
            "0 B", "1023 B", "1.5 KiB", "100 MiB", "3 TiB",
        ]  # fmt: skip
        assert [duration(v) for v in (None, 0.5, 59.99, 61, 7325)] == ["–", "0.5 s", "60 s", "1 min 1 s", "2 h 2 min"]

    def test_change(self):
        assert change(4.0, 3.0) == "−25.0\u2009%"
        assert change(4.0, 4.0001) == change(4.0, 3.9999) == "0.0\u2009%"
        assert change(None, 1.0) == change(0.0, 1.0) == change(1.0, float("nan")) == ""

    def test_spans(self):
        assert spans([7, 1, 2, 3]) == "1–3, 7"
        assert spans([]) == ""

    def test_visible(self):
        assert visible("a\u202eb\x00\n日本 é") == "a\ufffdb\ufffd\ufffd日本 é"

    def test_standard_error(self):
        # 0, 0, 1, 1: s² = 1/3, over 4 values: √(1/12)
        assert standard_error([0.0, 0.0, 1.0, 1.0]) == pytest.approx((1 / 12) ** 0.5)
        assert standard_error([1.0]) is None
