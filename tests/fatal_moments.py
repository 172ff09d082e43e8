"""A moment at which a machine dies: a call that is made fatal, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import pytest

from fedloom.runtime.events import RoundLog

Die = Callable[[], NoReturn]


class Killed(BaseException):
    """No error that anything may handle."""


class Point(NamedTuple):
    """Die at the ``nth`` call of ``owner.attribute`` whose arguments satisfy ``when``; ``half`` runs just before."""

    owner: Any
    attribute: str
    when: Callable[..., bool] = lambda *args, **kwargs: True
    nth: int = 1
    after: bool = False
    half: Callable[..., Any] = lambda *args, **kwargs: None


def arm(patch: pytest.MonkeyPatch, point: Point, die: Die) -> None:
    """Make ``point`` fatal."""
    inner = getattr(point.owner, point.attribute)
    calls = 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        hit = point.when(*args, **kwargs)
        calls += hit
        if not hit or calls != point.nth:
            return inner(*args, **kwargs)
        if point.attribute == "fit":  # inside: after its first step
            args[0].on_step = lambda loss: die()
        if point.after or point.attribute == "fit":
            inner(*args, **kwargs)
        point.half(*args, **kwargs)
        return die()

    patch.setattr(point.owner, point.attribute, fatal)


def by_exception() -> NoReturn:
    raise Killed


@contextmanager
def fatal(point: Point) -> Iterator[None]:
    """Make a point fatal, by an exception, for the time of a block."""
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, point, by_exception)
        yield


def half_a_line(log: RoundLog, record: dict[str, Any]) -> None:
    with open(log.path, "a", encoding="utf-8") as file:
        file.write('{"round": 2, "cohort": ["a')
