"""What clients of a model with experts say of the tokens that each expert had, where that decides what counts."""

from __future__ import annotations

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method, Schema
from fedloom.types import Order, Plain, Reply, component

#: No family of ``adapters.native.ROUTERS`` was published with more experts a token (DeepSeek, OLMoE and Qwen: 8).
MOST_A_TOKEN = 8


def check_activations(reply: Reply, schema: Schema) -> None:
    """Check that a reply states the tokens of exactly the experts in ``schema``: they are weights.

    Raises:
        UpdateRejected: it does not.
    """
    active: Plain = reply.values.get("activations")
    if not isinstance(active, dict):
        raise UpdateRejected("it states no 'activations'")
    experts = {component(name) for name in schema if name.startswith("experts/")}
    if differing := sorted(active.keys() ^ experts):
        which = "of an expert that it does not send" if differing[0] in active else "not of an expert that it sends"
        raise UpdateRejected(f"'activations' tells {which}: {differing[0]!r}")
    for unit, tokens in active.items():
        if type(tokens) is not int or tokens < 0:
            raise UpdateRejected(f"the activations of {unit!r} are {tokens!r}, not a number of tokens")


def gone_through(order: Order, reply: Reply) -> int:
    """Return how many examples a client goes through in what the order asks, with repetition."""
    training, rows = order.training, reply.counts["examples"]
    if order.kind == "probe":
        return rows
    drawn = training.steps * min(training.batch_size, rows)
    return min(drawn, training.epochs * rows) if training.epochs else drawn


def check_tokens(reply: Reply, rows: int, max_length: int) -> None:
    """Check that ``rows`` examples have the tokens that a reply states: an expert has each token once at most.

    Raises:
        UpdateRejected: they cannot.
    """
    layers: dict[str, list[int]] = {}
    active: Plain = reply.values.get("activations", {})
    if not isinstance(active, dict):
        raise UpdateRejected("'activations' are no numbers by expert")
    for unit, tokens in active.items():
        if type(tokens) is not int or tokens > rows * max_length:
            limit = f"{rows} × {max_length}, examples × data.max_length"
            raise UpdateRejected(f"the activations of {unit!r} are {tokens!r}; at most {limit}, can be")
        layers.setdefault(unit.rpartition(".")[0], []).append(tokens)
    for layer, found in layers.items():
        if sum(found) > (most := rows * max_length * min(len(found), MOST_A_TOKEN)):
            raise UpdateRejected(f"the activations of {layer!r} are {sum(found)} in all; at most {most} can be")


def bounded_by_tokens(method: Method, order: Order, reply: Reply, max_length: int) -> None:
    """``Method.plausible`` of methods whose clients count activations while they train."""
    check_tokens(reply, gone_through(order, reply), max_length)
