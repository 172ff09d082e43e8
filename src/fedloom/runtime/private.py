"""Differential privacy of the rounds: who is drawn, what is added to the sum, and what it has cost so far.

DP-FedAvg with a fixed denominator: McMahan et al., arXiv 1710.06963, Algorithm 1, estimator f̃_f; accounted per client
(with or without that client's contributions) for Poisson sampling. docs/privacy.md says what is not covered.
"""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedloom.errors import ConfigError
from fedloom.methods.base import Method
from fedloom.methods.protection import Privacy
from fedloom.numerics.privacy import gaussian
from fedloom.numerics.seeding import derive_seed
from fedloom.numerics.tree import norm
from fedloom.runtime.totals import Totals, mean_reply
from fedloom.types import Order, Plain, Reply, Tensors, component

#: Rényi orders. Opacus' own end at 63, too early for a budget of few rounds with much noise.
ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)] + [2.0**x for x in range(6, 13)]


def source_of(privacy: Privacy, seed: int, *purpose: str | int) -> int:
    """Return the seed of a random stream: of the operating system, or of the run if that is to be reproducible."""
    return derive_seed(seed, *purpose) if privacy.reproducible else secrets.randbits(63)


def poisson_cohort(clients: Sequence[str], rate: float, privacy: Privacy, seed: int, round: int) -> list[str]:
    """Draw each client by itself with probability ``rate``, which is what the accountant assumes; may be nobody."""
    draws = np.random.default_rng(source_of(privacy, seed, "cohort", round)).random(len(clients))
    return [client for client, draw in zip(clients, draws, strict=True) if draw < rate]


def require_opacus() -> None:
    """Raise a ConfigError that says how to install Opacus, if it is not there."""
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError("privacy needs Opacus, which is not installed: pip install 'fedloom[privacy]'")


def epsilon(privacy: Privacy, rate: float, rounds: int, probed: bool) -> float:
    """Return ε at ``privacy.delta`` after the probe, if there was one, and so many rounds; infinite without noise.

    Args:
        privacy: the noise.
        rate: probability with which a client takes part in a round.
        rounds: rounds that were released.
        probed: every client was asked before round 1.
    """
    spent = [(privacy.noise, rate, rounds)] if rounds else []
    if probed and privacy.probe_noise is not None:
        spent.insert(0, (privacy.probe_noise, 1.0, 1))
    if not spent:
        return 0.0
    if any(noise == 0 for noise, _, _ in spent):
        return math.inf
    require_opacus()
    from opacus.accountants import PRVAccountant, RDPAccountant

    accountant: Any = RDPAccountant() if privacy.accountant == "rdp" else PRVAccountant()
    accountant.history = spent
    more = {"alphas": ORDERS} if privacy.accountant == "rdp" else {}
    return float(accountant.get_epsilon(privacy.delta, **more))


def check_target(privacy: Privacy, rate: float, probed: bool) -> None:
    """Refuse a run that could not release one round.

    Raises:
        ConfigError: naming both numbers.
    """
    if privacy.target is not None and (first := epsilon(privacy, rate, 1, probed)) > privacy.target:
        raise ConfigError(
            f"privacy.target is ε = {privacy.target:g}, but {'the probe and ' * probed}round 1 alone cost {first:.3g} "
            f"at δ = {privacy.delta:g}. Take more noise, or fewer clients a round."
        )


def privatised(
    method: Method, orders: Sequence[Order], totals: Totals, privacy: Privacy, rate: float, source: torch.Generator
) -> tuple[Reply, float]:
    """Return the noised mean update as one reply, and how many times longer its noise is than the rest of it.

    Args:
        method: whose rule is a sum.
        orders: one for each client that could have been drawn: they fix the denominators, whoever answered.
        totals: of the clipped updates that came in, each with weight 1.
        privacy: see ``Privacy``.
        rate: probability with which a client was drawn.
        source: of the noise.
    """
    asked = [method.asked(order) for order in orders]
    sums = {n: torch.zeros(s, dtype=torch.float64) for schema in asked for n, s in schema.items()} | totals.sums
    divisors: dict[str, float] = {}
    for schema in asked:
        for unit in {component(name) for name in schema}:
            divisors[unit] = divisors.get(unit, 0.0) + rate
    noise = gaussian(sums, privacy.noise * privacy.clip, source)
    signal, added = (norm(_divided(part, divisors)) for part in (sums, noise))
    noised = {name: total + noise[name] for name, total in sums.items()}
    return mean_reply(noised, divisors), added / signal if signal > 0 else (math.inf if added > 0 else 0.0)


def _divided(sums: Tensors, divisors: dict[str, float]) -> Tensors:
    return {name: total / divisors[component(name)] for name, total in sums.items()}


def spending(privacy: Privacy, rate: float, rounds: int, probed: bool) -> dict[str, Plain]:
    """Return what the log says of the budget; ε is null without noise."""
    cost = epsilon(privacy, rate, rounds, probed)
    return {"epsilon": cost if math.isfinite(cost) else None, "delta": privacy.delta}
