"""What the differences say, in sentences made from the data alone; none is claimed without its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.bench import fedweave_paper as paper
from fedloom.bench.layout import p_words, signed
from fedloom.bench.results import ABLATIONS, MAIN, Results, Setting
from fedloom.bench.significance import Comparisons, Difference, holm
from fedloom.methods import METHODS
from fedloom.report.wording import listed, number

METRICS = ("loss", "score")
#: The papers' closest baselines; where a suite lacks them, the trend over settings is against FedIT or FedAvg.
RIVALS = ("fedlease", "fedit", "fedmoe", "fedavg_moe")
#: What an adjusted p must not exceed.
LEVEL = 0.05


@dataclass(frozen=True)
class Section:
    """Sentences under a heading."""

    title: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Holm:
    """A comparison's joint p, adjusted for all ``comparisons`` of the sections that have one."""

    p: float
    comparisons: int


@dataclass(frozen=True)
class Claim:
    """A − B, to be said in a sentence.

    Attributes:
        a, b: what is compared.
        metric: ``loss`` or ``score``.
        found: the comparison; None where per-example numbers are not on file.
        setting: which one it is of; comparisons that agree in all before, and in this, are one comparison.
        where: words before it, as ``α = 0.1``.
        after: a sentence behind it.
    """

    a: str
    b: str
    metric: str
    found: Difference | None
    setting: str = ""
    where: str = ""
    after: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What is compared; a group of sentences may repeat what another one says."""
        return self.a, self.b, self.metric, self.setting


#: A heading and what stands below it.
Group = tuple[str, list[Claim]]


def sentence(claim: Claim, adjusted: Holm | None = None) -> str:
    """Say how A differs from B, with the intervals; only what both tell apart is called better or worse."""
    a, b, metric, found = claim.a, claim.b, claim.metric, claim.found
    start = f"{claim.where}: " if claim.where else ""
    if found is None:
        said = f"{a} and {b}: macro {metric} cannot be compared: no per-example numbers of a common seed."
        return start + said + claim.after
    if found.p is None:
        said = (
            f"{a} minus {b} in macro {metric}: {signed(found.estimate)}; not every resample of the test rows is finite,"
        )
        return f"{start}{said} so there is no interval, no p and no verdict.{claim.after}"
    rows = f"95 % interval over test rows {signed(found.low)} to {signed(found.high)}, {p_words(found.p)}"
    spread = found.over_seeds
    if spread is None:
        seeds = f"seed{'s' if len(found.seeds) > 1 else ''} {listed([str(seed) for seed in found.seeds])}"
        said = f"{a} minus {b} in macro {metric}: {signed(found.estimate)} ({rows}; {seeds} only)."
        return f"{start}{said} Nothing follows for other seeds.{claim.after}"
    each = ", ".join(signed(d) for d in found.each)
    detail = f"{rows}; over seeds {signed(spread.low)} to {signed(spread.high)}, {p_words(spread.p)}; by seed {each}"
    if adjusted is not None:
        detail += f"; adjusted by Holm for {adjusted.comparisons} comparisons {p_words(adjusted.p)}"
    if not found.distinguishable:
        said = f"{a} and {b} are not distinguishable in macro {metric} (difference {signed(found.estimate)}, {detail})."
        return start + said + claim.after
    side = "below" if found.estimate < 0 else "above"
    better = "better" if (found.estimate < 0) == (metric == "loss") else "worse"
    but = ", but not once all comparisons are counted" if adjusted is not None and adjusted.p > LEVEL else ""
    said = f"{a} is {side} {b} by {number(abs(found.estimate))} in macro {metric}, which is {better}{but} ({detail})."
    return start + said + claim.after


def said_of(claims: Sequence[Sequence[Claim]]) -> list[list[str]]:
    """Return the sentences of several groups of claims; Holm's adjustment is over all of them, each once."""
    found = {claim.key: claim.found.joint_p for group in claims for claim in group if claim.found is not None}
    known = {key: p for key, p in found.items() if p is not None}
    adjusted = dict(zip(known, holm(list(known.values())), strict=True))
    notes = {key: Holm(p, len(known)) for key, p in adjusted.items()}
    return [[sentence(claim, notes.get(claim.key)) for claim in group] for group in claims]


def reading(results: Results, comparisons: Comparisons) -> list[Section]:
    """Return the sections for the main setting, and the main method against its rival over all settings."""
    main = results.settings[0]
    if results.main not in results.labels(main):
        title = METHODS[results.main].title
        return [Section(main.text, (f"{title} has no result in this setting, so nothing is compared with it.",))]
    groups = [
        _baselines(results, comparisons, main),
        _mixture(results, comparisons, main),
        _ablations(results, comparisons, main),
        _routing(results, comparisons, main),
        _trend(results, comparisons, main.backbone),
    ]
    said = said_of([claims for _, claims in groups])
    return [Section(title, tuple(found)) for (title, _), found in zip(groups, said, strict=True) if found]


def _baselines(results: Results, comparisons: Comparisons, setting: Setting) -> Group:
    title = results.title(results.main)
    found = [
        Claim(title, rival, m, comparisons.labels(setting, results.main, label, m), setting.text)
        for label, rival in _rivals(results, setting)
        for m in _measured(results, setting)
    ]
    return f"{title} against each baseline ({setting.text})", found


def _mixture(results: Results, comparisons: Comparisons, setting: Setting) -> Group:
    """FedWeave's mixture of all experts against the baselines; the paper compares one expert only."""
    if "soft" not in results.modes(setting, MAIN)[1:]:
        return "", []
    title = f"{results.title(MAIN)}'s mixture"
    found = [
        Claim(title, rival, m, comparisons.labels(setting, MAIN, label, m, mode_a="soft"), setting.text)
        for label, rival in _rivals(results, setting)
        for m in _measured(results, setting)
    ]
    return f"{title} of all experts, which the paper does not compare, against each baseline ({setting.text})", found


def _rivals(results: Results, setting: Setting) -> list[tuple[str, str]]:
    """Return label and title of each baseline that has a global model."""
    labels = [x for x in results.compared(setting) if x != results.main and not results.is_variant(x)]
    pooled = {x: " (pooled data)" if results.is_pooled(x) else "" for x in labels}
    return [(x, results.title(x) + pooled[x]) for x in labels if results.has_global_model(x)]


def _ablations(results: Results, comparisons: Comparisons, setting: Setting) -> Group:
    found = []
    for label in results.labels(setting):
        if results.is_variant(label):
            for metric in _measured(results, setting):
                difference = comparisons.labels(setting, label, results.main, metric)
                printed = _printed(paper.ABLATION.get((label, metric)), setting)
                titles = results.title(label), results.title(results.main)
                found.append(Claim(*titles, metric, difference, setting.text, after=printed))
    ablated = set(ABLATIONS) & set(results.labels(setting)) or results.main != MAIN
    words = "Ablations and variants" if ablated else f"Variants of {results.title(results.main)}"
    return f"{words} ({setting.text})", found


def _routing(results: Results, comparisons: Comparisons, setting: Setting) -> Group:
    modes = results.modes(setting, MAIN)
    found = []
    for mode in modes:
        if mode != "top1" and "top1" in modes:
            for metric in _measured(results, setting):
                difference = comparisons.modes(setting, MAIN, "top1", mode, metric)
                printed = [paper.ROUTING.get((m, "score")) for m in ("top1", mode)]
                gap = None
                if metric == "score" and printed[0] and printed[1]:
                    gap = paper.Printed(printed[0].value - printed[1].value, printed[0].where)
                found.append(Claim("top1", mode, metric, difference, setting.text, after=_printed(gap, setting)))
    return f"One expert against several, same FedWeave models ({setting.text})", found


def _trend(results: Results, comparisons: Comparisons, backbone: str) -> Group:
    """The main method against its rival in every setting of the backbone; each setting is a comparison of its own."""
    settings = sorted(
        (s for s in results.settings if s.backbone == backbone and results.main in results.labels(s)),
        key=lambda s: [(name, value if isinstance(value, int | float) else 0.0, str(value)) for name, value in s.axes],
    )
    rival = next((r for r in RIVALS if sum(r in results.labels(s) for s in settings) > 1), None)
    if rival is None:
        return "", []
    found = []
    for metric in METRICS:
        for setting in settings:
            if rival in results.labels(setting) and metric in _measured(results, setting):
                difference = comparisons.labels(setting, results.main, rival, metric)
                printed = paper.OVER_FEDLEASE.get((setting.get("alpha"), metric)) if rival == "fedlease" else None
                after = f" Paper, {paper.LLAMA}: {signed(printed.value)}." if printed else ""
                titles = results.title(results.main), results.title(rival)
                found.append(Claim(*titles, metric, difference, setting.text, setting.text, after))
    return f"{results.title(results.main)} against {results.title(rival)} in every setting", found


def _measured(results: Results, setting: Setting) -> list[str]:
    """Return the metrics that the main method has in this setting: without generation there is no score to miss."""
    return [m for m in METRICS if any(c.measured(m) is not None for c in results.of(setting, results.main))]


def _printed(printed: paper.Printed | None, setting: Setting) -> str:
    """Return the paper's difference, where the setting is the paper's main one."""
    same = printed is not None and setting.get("alpha") == paper.ALPHA
    return f" Paper, {paper.LLAMA}: {signed(printed.value)}." if printed and same else ""
