"""Numbers and names as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

MISSING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Format with fixed digits and a true minus sign; nothing is a dash."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.{digits}f}".replace("-", "−")


def whole(value: int | None) -> str:
    """Format an integer with commas between thousands."""
    return MISSING if value is None else f"{value:,}"


def change(before: float | None, after: float | None) -> str:
    """Return the relative change, ``−12.3 %``; empty where there is nothing to compare."""
    if before is None or after is None or before == 0 or not math.isfinite(before * after):
        return ""
    text = f"{100 * (after - before) / abs(before):+.1f}"
    return ("0.0" if float(text) == 0 else text.replace("-", "−")) + "\u2009%"


def size(count: float) -> str:
    """Format bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def duration(seconds: float | None) -> str:
    """Format seconds in the two largest units that matter."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def plural(count: int, noun: str) -> str:
    """``1 round``, ``3 rounds``, ``no rounds``."""
    return f"{whole(count) if count else 'no'} {noun}{'' if count == 1 else 's'}"


def visible(name: Any) -> str:
    """Return a name from data with control and direction characters made visible, so that it cannot disturb a page."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(name))


def breakable(name: Any) -> Markup:
    """Return ``visible`` as markup that may be broken after an underscore."""
    return Markup("_<wbr>").join(visible(name).split("_"))


def spans(rounds: Iterable[int]) -> str:
    """``[1, 2, 3, 7]`` → ``1–3, 7``."""
    found: list[list[int]] = []
    for r in sorted(rounds):
        if found and r == found[-1][1] + 1:
            found[-1][1] = r
        else:
            found.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)


def privacy_words(records: Iterable[Mapping[str, Any]], *, noise: bool = False) -> str:
    """Say what the rounds have cost in privacy; empty without privacy.

    Args:
        records: the lines of a log.
        noise: say, too, how much longer than the update it was in the last round, which tells of the update.
    """
    found = [(record["round"], record["privacy"]) for record in records if record.get("privacy")]
    if not found:
        return ""
    round, last = found[-1]
    if last["epsilon"] is None:
        return f"no noise: ε is infinite at δ = {last['delta']:g}"
    words = f"ε = {last['epsilon']:.3g} at δ = {last['delta']:g} is spent"
    if noise and (factor := last.get("noise_to_signal")) is not None:
        words += f"; in round {round} the noise was {factor:.3g} times as long as the clients' mean update"
    return words


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


FILTERS: dict[str, Callable[..., str]] = {
    f.__name__: f for f in (number, whole, size, duration, plural, visible, breakable)
}
