"""Everything that is written, from whole, partial and single results; the page is self-contained and harmless."""

import csv
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from bench_records import run, suite, write
from matplotlib.axes import Axes
from PIL import Image

from fedloom.bench.drawing import spread
from fedloom.bench.figures import all_figures, band, caption, hues, over_axis, paired_points
from fedloom.bench.outputs import write_outputs
from fedloom.bench.reading import Claim, Holm, reading, said_of, sentence
from fedloom.bench.results import Stat, load_results
from fedloom.bench.significance import Comparisons, Difference

HOSTILE = "<script>alert('x')</script>\"&'|`"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = write(tmp_path_factory.mktemp("whole"), suite())
    return out, write_outputs(out, f"Title {HOSTILE}", [f"Note {HOSTILE}"])


def test_everything_is_written(whole):
    out, written = whole
    names = {path.relative_to(out).as_posix() for path in written}
    tables = ["table1", "table1_personalised", "table2", "table3", "table4", "table5", "costs"]
    figures = ["table1_loss", "fig2_routing", "fig3_alpha", "fig4_routing_cost", "loss_curves"]
    assert {f"tables/{t}.{kind}" for t in tables for kind in ("md", "csv")} <= names
    assert {f"figures/{f}.{kind}" for f in figures for kind in ("svg", "png")} <= names
    assert all(path.stat().st_size for path in written)
    for path in (out / "tables").glob("*.csv"):
        lines = list(csv.reader(path.open(encoding="utf-8", newline="")))
        assert len({len(line) for line in lines}) == 1
        assert len(set(lines[0])) == len(lines[0]), path
    assert Image.open(out / "figures" / "fig3_alpha.png").width >= 800


def test_the_same_results_give_the_same_bytes(whole):
    out, written = whole
    before = {path: path.read_bytes() for path in written}
    assert write_outputs(out, f"Title {HOSTILE}", [f"Note {HOSTILE}"]) == written
    assert {path: path.read_bytes() for path in written} == before
    svg = (out / "figures" / "fig2_routing.svg").read_text()
    assert "<dc:date>" not in svg


def test_the_page_loads_nothing_and_takes_titles_as_text(whole):
    out, _ = whole
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "link", "iframe"} & set(page.tags)
    loads = [value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert loads
    assert all(value.startswith("data:image/svg+xml;base64,") for value in loads)
    assert not re.search(r"@import|url\(", (out / "report.html").read_text(encoding="utf-8"))
    assert page.text.count(HOSTILE) >= 3  # heading, <title>, note
    assert all(not name.startswith("on") for name, _ in page.attributes)


def test_hostile_names_in_the_records_are_text_too(tmp_path):
    runs = [run(label, title=HOSTILE, modes=("top1", "soft"), tasks=(HOSTILE, "b$\\frac$")) for label in ("fedweave",)]
    write_outputs(write(tmp_path, runs), "t")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert HOSTILE in page.text
    assert "<script>" not in (tmp_path / "figures" / "fig2_routing.svg").read_text()


def test_one_record_is_enough(tmp_path):
    written = write_outputs(write(tmp_path, [run("fedit", score=None)]), "One run")
    names = {path.name for path in written}
    assert {"table1.md", "table5.csv", "costs.md", "table1_loss.png", "loss_curves.svg", "report.html"} <= names
    assert not {"table2.md", "table3.md", "table4.md", "fig2_routing.svg", "fig3_alpha.svg"} & names
    text = (tmp_path / "tables" / "table1.md").read_text(encoding="utf-8")
    assert "–" in text
    assert "**" not in text.split("\n", 1)[1]  # nothing to be best of
    assert "FedWeave has no result in this setting" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_record_with_nothing_measured(tmp_path):
    bare = {"cell": "a", "label": "local", "title": "Local", "method": "local", "seed": 1, "backbone": "tiny"}
    (tmp_path / "results.jsonl").write_text(json.dumps(bare) + "\n")
    names = {path.name for path in write_outputs(tmp_path, "Nothing")}
    assert {"table5.md", "costs.md", "report.html"} <= names
    assert not any(name.endswith(".png") for name in names)


def test_without_examples_nothing_is_claimed(tmp_path):
    out = write(tmp_path, [run("fedweave", loss=1.0), run("fedit", loss=2.0)], examples=False)
    results = load_results(out)
    (section,) = reading(results, Comparisons(results))
    assert all("cannot be compared" in said for said in section.sentences)


def test_every_claim_stands_with_its_interval_and_p(whole):
    results = load_results(whole[0])
    sections = reading(results, Comparisons(results))
    assert [section.title for section in sections] == [
        "FedWeave against each baseline (tiny, α = 0.3)",
        "FedWeave's mixture of all experts, which the paper does not compare, against each baseline (tiny, α = 0.3)",
        "Ablations and variants (tiny, α = 0.3)",
        "One expert against several, same FedWeave models (tiny, α = 0.3)",
        "FedWeave against FedLEASE in every setting",
    ]
    for said in (s for section in sections for s in section.sentences):
        assert "95 % interval" in said
        assert re.search(r"p [=≤] [01]\.\d", said), said
        claims = re.search(r" is (above|below) ", said)
        assert bool(claims) != ("not distinguishable" in said)
    words = [s for section in sections for s in section.sentences]
    assert any(s.startswith("FedWeave is below FFA-LoRA by 0.3000 in macro loss, which is better") for s in words)
    assert all(re.search(r"Holm for \d+ comparisons p ", s) for s in words)
    # Of both metrics: 4 baselines with top1, the same 4 with the mixture, 3 variants, 2 other routings, and FedLEASE at
    # 3 values of α, of which the main one stands among the baselines already.
    assert {re.search(r"for (\d+) comparisons", s)[1] for s in words} == {str(2 * (4 + 4 + 3 + 2 + 3 - 1))}
    assert len(words) == 2 * (4 + 4 + 3 + 2 + 3)
    said = "FedWeave's mixture is below FedIT by 0.1200 in macro loss, which is better"  # 0.1 and 0.02 for the mixture
    assert any(s.startswith(said) for s in words)
    assert any(s.startswith("w/o client-router and FedWeave are not distinguishable in macro loss") for s in words)
    assert any(s.startswith("tiny, α = 0.1: ") and s.endswith("Paper, Llama-3.2-3B: −0.0256.") for s in words)


def test_wording_of_a_difference():
    below = Difference(-0.02, -0.03, -0.01, 2 / 2001, (42, 43, 44), (-0.021, -0.019, -0.02))
    assert sentence(Claim("A", "B", "loss", below)) == (
        "A is below B by 0.0200 in macro loss, which is better (95 % interval over test rows −0.0300 to −0.0100, "
        "p ≤ 0.001; over seeds −0.0225 to −0.0175, p ≤ 0.001; by seed −0.0210, −0.0190, −0.0200)."
    )
    assert "which is worse (" in sentence(Claim("A", "B", "score", below), Holm(0.03, 9))
    lost = sentence(Claim("A", "B", "score", below, "α = 0.1", "here", " Paper: 1."), Holm(0.06, 9))
    assert lost.startswith(
        "here: A is below B by 0.0200 in macro score, which is worse, but not once all comparisons are"
    )
    assert lost.endswith("Holm for 9 comparisons p = 0.060). Paper: 1.")


def test_rows_alone_make_no_verdict():
    """Test rows tell the methods apart, the seeds do not, or are too few to tell."""
    split = Difference(-0.02, -0.03, -0.01, 0.01, (42, 43, 44), (-0.07, 0.0, 0.01))
    said = sentence(Claim("A", "B", "loss", split))
    assert said.startswith("A and B are not distinguishable in macro loss (difference −0.0200, 95 % interval over test")
    for seeds, words in (((42,), "seed 42 only"), ((42, 43), "seeds 42 and 43 only")):
        few = Difference(-0.02, -0.03, -0.01, 2 / 2001, seeds, (-0.02,) * len(seeds))
        assert sentence(Claim("A", "B", "loss", few)) == (
            "A minus B in macro loss: −0.0200 (95 % interval over test rows −0.0300 to −0.0100, p ≤ 0.001; "
            f"{words}). Nothing follows for other seeds."
        )


def test_holm_counts_every_comparison_with_enough_seeds():
    clear = Difference(-0.02, -0.03, -0.01, 0.01, (1, 2, 3), (-0.02, -0.02, -0.02))
    few = Difference(-0.02, -0.03, -0.01, 0.01, (1,), (-0.02,))
    (first, second), (third,) = said_of(
        [[Claim("A", "B", "loss", clear), Claim("A", "C", "loss", few)], [Claim("A", "D", "loss", clear)]]
    )
    assert "Holm for 2 comparisons p = 0.020" in first
    assert "Holm" not in second
    assert "Holm for 2 comparisons p = 0.020" in third


def test_holm_counts_a_comparison_once_though_two_groups_tell_it():
    """Three comparisons, four sentences: 0.01 × 3 = 0.03, 0.03 × 2 = 0.06, and 0.04 × 1, not below the one before."""

    def claim(b, p, where="", setting="here"):
        found = Difference(-0.02, -0.03, -0.01, p, (1, 2, 3), (-0.02,) * 3)
        return Claim("A", b, "loss", found, setting, where)

    first, again = said_of([[claim("B", 0.01), claim("C", 0.04)], [claim("B", 0.01, "here"), claim("D", 0.03)]])
    adjusted = [re.search(r"Holm for (\d+) comparisons (p = [\d.]+)\)", s).groups() for s in first + again]
    assert adjusted == [("3", "p = 0.030"), ("3", "p = 0.060"), ("3", "p = 0.030"), ("3", "p = 0.060")]
    assert again[0] == "here: " + first[0]
    (one,), (two,) = said_of([[claim("B", 0.02)], [claim("B", 0.02, "there", "there")]])  # equal numbers, two settings
    assert "Holm for 2 comparisons p = 0.040" in one
    assert "Holm for 2 comparisons p = 0.040" in two


@pytest.mark.parametrize(
    ("modes", "claims"), [(("top1", "soft"), 2), (("top1", "top2"), 0), (("soft", "top1"), 0), (("top1",), 0)]
)
def test_the_mixture_is_compared_only_where_it_is_not_the_first_routing(tmp_path, modes, claims):
    runs = [run("fedweave", seed, modes=modes, title="FedWeave") for seed in (42, 43, 44)]
    runs += [run("fedit", seed, 2.0, title="FedIT") for seed in (42, 43, 44)]
    results = load_results(write(tmp_path, runs))
    sections = reading(results, Comparisons(results))
    said = [s for section in sections if "mixture" in section.title for s in section.sentences]
    assert len(said) == claims
    assert all(s.startswith("FedWeave's mixture ") for s in said)
    assert bool(claims) == any(s.startswith("FedWeave's mixture is below FedIT by 1.0100") for s in said)


def test_two_seeds_are_called_better_nowhere(tmp_path):
    runs = [run(label, seed, loss) for label, loss in (("fedweave", 1.0), ("fedit", 2.0)) for seed in (42, 43)]
    out = write(tmp_path, runs)
    results = load_results(out)
    (section,) = reading(results, Comparisons(results))
    assert all("Nothing follows for other seeds" in said for said in section.sentences)
    assert not any("better" in said or "worse" in said for said in section.sentences)


def test_labels_are_spread_as_little_as_needed():
    assert spread([1.0, 5.0], 1.0) == [1.0, 5.0]
    assert spread([1.0, 1.0], 1.0) == [0.5, 1.5]
    assert spread([3.0, 1.0, 1.5], 1.0) == pytest.approx([3.0, 0.75, 1.75])
    placed = spread([0.0, 0.1, 0.2, 1.2], 1.0)
    assert np.diff(placed) == pytest.approx([1, 1, 1])
    assert np.mean(placed) == pytest.approx(np.mean([0.0, 0.1, 0.2, 1.2]))


def test_figures_of_one_setting_have_no_trend(tmp_path):
    results = load_results(write(tmp_path, [run("fedweave", modes=("top1", "soft"), score=None), run("fedit")]))
    found = {picture.name: picture for picture in all_figures(results)}
    assert found.keys() == {"table1_loss", "fig2_routing", "fig4_routing_cost", "loss_curves"}
    assert "macro loss" in found["fig4_routing_cost"].title  # there is no score
    assert "gsm8k mostly E2" in found["fig2_routing"].text


def test_captions_say_how_a_model_routes_and_of_how_many_seeds(tmp_path, monkeypatch):
    runs = [run("fedweave", seed, modes=("top1", "soft"), title="FedWeave") for seed in (42, 43)]
    runs += [run("fedlease", seed, modes=("soft", "top1"), title="FedLEASE") for seed in (42, 43)]
    runs += [run("fedit", seed, title="FedIT") for seed in (42, 43)]
    runs += [run("fedrouter", seed, experts=1, title="FedRouter") for seed in (43, 42, 44)]
    results = load_results(write(tmp_path, runs))
    main = results.settings[0]
    captions = [caption(results, main, label, 2) for label in results.labels()]
    assert captions == ["FedWeave (top1, n = 2)", "FedLEASE (soft, n = 2)", "FedIT (n = 2)", "FedRouter (n = 2)"]
    points = []  # their letters have an outline, so the file holds them as shapes
    monkeypatch.setattr("fedloom.bench.figures.point_labels", lambda *a: points.extend(name for _, _, name, _ in a[2]))
    drawn = {picture.name: picture.svg.decode() for picture in all_figures(results)}
    for name in ("table1_loss", "loss_curves"):
        assert all(f">{words}<" in drawn[name] for words in captions), name
    assert points == [
        "FedWeave top1 (n = 2)",
        "FedWeave soft (n = 2)",
        "FedLEASE soft (n = 2)",
        "FedLEASE top1 (n = 2)",
    ]


def test_a_line_over_an_axis_is_of_the_seeds_that_all_its_points_have(tmp_path):
    """By seed, at α = 0.1, 0.3, 0.5; the common ones of FedWeave are 42 and 43."""
    losses = {
        "fedweave": {0.1: {42: 1.0, 43: 3.0}, 0.3: {42: 2.0, 43: 2.5, 44: 9.0}, 0.5: {42: 4.0, 43: 6.0, 45: 9.0}},
        "fedlease": {0.1: {42: 1.0}, 0.5: {42: 2.0, 43: 9.0}},  # not measured at 0.3
        "fedit": {0.1: {42: 1.0}, 0.3: {43: 1.0}},  # nothing in common
    }
    runs = [
        run(label, seed, loss, alpha=alpha)
        for label, by_alpha in losses.items()
        for alpha, by_seed in by_alpha.items()
        for seed, loss in by_seed.items()
    ]
    for record, _ in runs:
        record["routing"]["top1"]["loss"]["macro"] = losses[record["label"]][record["alpha"]][record["seed"]]
    results = load_results(write(tmp_path, runs))
    settings = sorted(results.settings, key=lambda s: s.get("alpha"))
    assert paired_points(results, settings, "fedweave", "loss") == [
        (0, Stat((1.0, 3.0), (42, 43))), (1, Stat((2.0, 2.5), (42, 43))), (2, Stat((4.0, 6.0), (42, 43))),
    ]  # fmt: skip
    lease = [(0, Stat((1.0,), (42,))), (2, Stat((2.0,), (42,)))]
    assert paired_points(results, settings, "fedlease", "loss") == lease
    assert paired_points(results, settings, "fedit", "loss") == []
    assert paired_points(results, settings, "absent", "loss") == []


def test_one_seed_has_no_band(tmp_path, monkeypatch):
    assert band([Stat((1.0,)), Stat((2.0,))]) is None
    low, high = band([Stat((1.0, 3.0)), Stat((2.0, 2.0))])  # sd √2 and 0
    assert (low, high) == (pytest.approx([2 - 2**0.5, 2]), pytest.approx([2 + 2**0.5, 2]))
    drawn = []
    monkeypatch.setattr(Axes, "fill_between", lambda *_, color, **__: drawn.append(color))
    runs = [run("fedweave", seed, alpha=alpha, score=None) for seed in (42, 43) for alpha in (0.1, 0.3)]
    results = load_results(write(tmp_path / "two", runs))
    over_axis(results, results.settings[0], "alpha")
    assert drawn == [hues(results)["fedweave"]]
    runs += [run("fedlease", 42, alpha=alpha, score=None, title="FedLEASE") for alpha in (0.1, 0.3)]
    results = load_results(write(tmp_path / "one", runs))
    picture = over_axis(results, results.settings[0], "alpha")
    assert len(drawn) == 1  # nothing new: both lines are of seed 42
    assert ">FedLEASE (n = 1)<" in picture.svg.decode()
    assert picture.text.endswith("Over the seeds that all shown have: seed 42.")


def test_the_page_says_which_p_are_adjusted(whole):
    """The tables hold p values that no sentence tells, so no adjustment can count all of the page."""
    page = (whole[0] / "report.html").read_text(encoding="utf-8")
    assert "comparisons of this section" in page
    assert "comparisons of this page" not in page
    for name in ("table2", "table3", "table4"):
        text = (whole[0] / "tables" / f"{name}.md").read_text(encoding="utf-8")
        assert "These p are not adjusted for their number." in text
        assert "Rows that several seeds share count as independent" in text


def test_pooled_training_is_said_not_to_be_ranked_in_the_personalised_table_too(whole):
    text = (whole[0] / "tables" / "table1_personalised.md").read_text(encoding="utf-8")
    assert "| Centralised (pooled data, not ranked) | 3 |" in text
    assert "| Centralised |" not in text


def test_spread_labels_stay_inside():
    assert spread([0.0, 0.0, 0.1], 1.0, low=0.0) == [0.0, 1.0, 2.0]
    assert spread([9.0, 9.5, 2.0], 1.0, high=9.5) == [8.5, 9.5, 2.0]
