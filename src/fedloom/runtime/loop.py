"""The rounds: sample, order, exchange, quarantine, merge, evaluate, log, checkpoint. The same for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from fedloom.errors import RoundError
from fedloom.methods.base import Method
from fedloom.methods.server import Uniform, server_step
from fedloom.numerics.seeding import numpy_generator
from fedloom.runtime.answers import Answers, Federation, Receipt, judge
from fedloom.runtime.checkpoint import Checkpoint, CheckpointFolder
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.joining import Door, Newcomers, nobody
from fedloom.runtime.private import check_target, epsilon, poisson_cohort, privatised, source_of, spending
from fedloom.runtime.secure_round import secure_exchange
from fedloom.runtime.totals import totals_of
from fedloom.types import Order, Plain, Replies, Setup, State, Training

__all__ = ["Answers", "Federation", "Receipt", "Transport", "federate", "judge"]


class Transport(Protocol):
    """Carries orders to clients and brings back what answered; an absent client has no receipt."""

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]: ...

    def ask(
        self, method: Method, round: int, messages: dict[str, bytes], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]:
        """Carry messages of a secure round; see ``runtime.secure_client``."""
        ...

    def committed(self, memory_versions: set[str]) -> None:
        """A checkpoint was committed; only these versions of client memories are still named by one."""
        ...


def federate(
    method: Method,
    transport: Transport,
    setup: Setup,
    training: Training,
    federation: Federation,
    checkpoints: CheckpointFolder,
    log: RoundLog,
    observer: Observer,
    *,
    evaluate: Callable[[State, dict[str, str]], dict[str, Plain] | None] = lambda state, memories: None,
    newcomers: Newcomers = nobody,
) -> State:
    """Run the probe and all rounds, from the newest checkpoint if there is one.

    Args:
        evaluate: called after the probe (``state.round`` 0) and after every round with the state and the versions of
            the clients' memories; a dictionary goes into the log.
        newcomers: names late joiners; see ``runtime.joining``.

    Returns:
        The state after the last round.

    Raises:
        RoundError: a round got fewer usable replies than ``federation.min_replies``, or what came of it is not finite;
            the last checkpoint stands.
    """

    def exchange(
        kind: str, state: State, cohort: Sequence[str], memories: dict[str, str], federation: Federation = federation
    ) -> Answers:
        orders = make_orders(method, kind, state, cohort, training)
        start = time.perf_counter()
        if kind == "fit" and federation.secagg is not None:
            return secure_exchange(method, transport, orders, memories, federation, observer)
        receipts = transport.exchange(method, orders, memories, observer) if orders else []
        answers = judge(method, orders, receipts, federation, time.perf_counter() - start)
        # Whoever is quarantined goes on from the memory before the round, as one whose answer never came.
        usable = [r for r in answers.receipts if r.client not in answers.quarantined]
        memories.update({r.client: r.memory for r in usable if r.memory is not None})
        for client, why in sorted(answers.quarantined.items()):
            observer.say(f"Round {state.round}: the reply of {client} is quarantined: {why}.")
        return answers

    def protect(state: State, admitted: Sequence[str], answers: Answers, record: dict[str, Plain]) -> Replies:
        """Return what the server's rule gets to see, and say in the record what that has cost."""
        if privacy is None:
            return answers.replies
        orders = make_orders(method, "fit", state, admitted, training)
        source = torch.Generator().manual_seed(source_of(privacy, setup.seed, "noise", state.round))
        totals = answers.totals if answers.totals is not None else totals_of(Uniform(answers.replies))
        reply, factor = privatised(method, orders, totals, privacy, federation.participation, source)
        record["privacy"] = spent(state.round) | {"noise_to_signal": factor if math.isfinite(factor) else None}
        if factor > privacy.warn:
            observer.say(f"Round {state.round}: the noise is {factor:.3g} times as long as the clients' mean update.")
        return [reply]

    def spent(rounds: int) -> dict[str, Plain]:
        assert privacy is not None
        return spending(privacy, federation.participation, rounds, method.has_probe)

    def commit(state: State, memories: dict[str, str], record: dict[str, Plain]) -> None:
        """Log first, then checkpoint: a kill in between leaves a line that ``cut_after`` removes, never a gap."""
        check_finite(state)
        if "log" in state.values:  # what the method's own rule saw in this round
            record["method"] = state.values["log"]
        evaluation = evaluate(state, memories)
        if evaluation is not None:
            record["evaluation"] = evaluation
        log.append(record)
        checkpoints.commit(Checkpoint(state, dict(memories), door.joined))
        transport.committed(checkpoints.memory_versions())
        observer.round(record)

    def ask_late(names: Sequence[str], memories: dict[str, str]) -> Answers:
        return exchange("probe", method.init(setup), names, memories, replace(federation, min_replies=0))

    door = Door(method, federation, observer, setup.clients, newcomers, ask_late)
    privacy = federation.privacy
    if privacy is not None:
        check_target(privacy, federation.participation, method.has_probe)
        if privacy.reproducible:
            observer.say("privacy.reproducible: noise and cohorts come from the run's seed, which protects nobody.")
    done = checkpoints.rounds()
    if done:
        checkpoint = checkpoints.load(done[-1])
        state, memories, door.joined = checkpoint.state, dict(checkpoint.memories), checkpoint.joined
        log.cut_after(state.round)
        observer.say(f"Resuming after round {state.round} of {federation.rounds}.")
    else:
        log.cut_after(-1)
        state, memories = method.init(setup), {}
        record: dict[str, Plain] = {"round": 0}
        if method.has_probe:
            observer.phase("probe", len(setup.clients))
            begun = time.perf_counter()
            answers = exchange("probe", state, setup.clients, memories)
            state = method.discover(state, answers.replies)
            record |= answers.record() | server_time(begun, answers)
            record |= {"privacy": spent(0)} if privacy is not None else {}
        state = door.open(state, memories, record)
        commit(state, memories, record)

    observer.phase("rounds", federation.rounds)
    observer.advance(state.round)
    while state.round < federation.rounds:
        if privacy is not None and privacy.target is not None:
            cost = epsilon(privacy, federation.participation, state.round + 1, method.has_probe)
            if cost > privacy.target:
                observer.say(
                    f"The run ends after round {state.round}: another would cost ε = {cost:.3g} in all, beyond the "
                    f"target {privacy.target:g} at δ = {privacy.delta:g}."
                )
                break
        state = replace(state, round=state.round + 1)
        admitted = door.admitted(state)
        cohort = draw(admitted, federation, setup.seed, state.round)
        begun = time.perf_counter()
        answers = exchange("fit", state, cohort, memories)
        record = {"round": state.round, "cohort": cohort} | answers.record()
        state = server_step(method, state, protect(state, admitted, answers, record), federation.server)
        record |= server_time(begun, answers)
        state = door.open(state, memories, record)
        commit(state, memories, record)
        observer.advance()
    return state


def check_finite(state: State) -> None:
    """Refuse a state that no round could mend: NaN and infinity stay, and every honest reply to them is quarantined.

    Raises:
        RoundError: naming the tensors.
    """
    tensors = [*sorted(state.tensors.items()), *sorted(state.kept.items())]
    bad = [name for name, tensor in tensors if not torch.isfinite(tensor).all()]
    if bad:
        raise RoundError(
            f"round {state.round} made {len(bad)} tensors of the server's state that hold NaN or infinity, first "
            f"{bad[0]!r}. It was not kept: started again, the run goes on from the last checkpoint. If that happens "
            "again, lower the learning rates, or leave out the site whose losses in rounds.jsonl went astray."
        )


def server_time(begun: float, answers: Answers) -> dict[str, Plain]:
    """Return how long the server has worked since ``begun`` beside the exchange, in seconds, for the log alone.

    That is making the orders, reading and checking what came, protecting it, and the method's rule. In a secure round
    reading and checking is a part of the exchange. Late joiners, evaluation and checkpoint come after.
    """
    return {"server_seconds": round(max(0.0, time.perf_counter() - begun - answers.seconds), 3)}


def draw(clients: Sequence[str], federation: Federation, seed: int, round: int) -> list[str]:
    """Draw a round's clients, in name order."""
    if federation.privacy is not None:
        return poisson_cohort(clients, federation.participation, federation.privacy, seed, round)
    return sample_cohort(clients, federation.participation, seed, round)


def cohort_size(clients: int, participation: float) -> int:
    """Return how many of so many clients take part in a round: at least one; halves count up."""
    return max(1, int(participation * clients + 0.5))


def sample_cohort(clients: Sequence[str], participation: float, seed: int, round: int) -> list[str]:
    """Draw ``participation`` of the clients (at least one) without replacement, in name order."""
    count = cohort_size(len(clients), participation)
    if count >= len(clients):
        return list(clients)
    chosen = numpy_generator(seed, "cohort", round).choice(len(clients), size=count, replace=False)
    return [clients[i] for i in sorted(chosen)]


def make_orders(method: Method, kind: str, state: State, cohort: Sequence[str], training: Training) -> list[Order]:
    """Make one order per client of the cohort, in name order."""
    views = {client: method.view(state, client) for client in sorted(cohort)}
    return [Order(kind, c, state.round, v.tensors, v.spec, training, v.values) for c, v in views.items()]
