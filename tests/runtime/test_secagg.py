"""Secure aggregation as two state machines: sums by plain integer arithmetic, dropouts, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is an option of its own")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import RoundError, SiteRefusal, UpdateRejected
from fedloom.numerics.fixed import HEAVIEST, LARGEST, Layout
from fedloom.runtime.secagg import SecureClient, SecureSum, keystream, pair_mask, raw, text, threshold_of

NAMES = ["ann", "bob", "cyd", "dan", "eve"]
LENGTH = 64


def vectors(names: list[str] = NAMES) -> dict[str, Any]:
    source = np.random.default_rng(3)
    return {name: source.integers(-(1 << 60), 1 << 60, LENGTH) for name in names}


def until_mask(threshold: int = 3, silent: tuple[str, ...] = ()) -> tuple[dict[str, SecureClient], SecureSum]:
    """Exchange keys and shares; ``silent`` clients send keys but no shares."""
    clients = {name: SecureClient(name) for name in NAMES}
    server = SecureSum(threshold, LENGTH)
    for name, client in clients.items():
        server.take_keys(name, client.keys(7))
    for name, client in clients.items():
        sealed = client.shares(7, server.keys, threshold)
        if name not in silent:
            server.take_shares(name, sealed)
    return clients, server


def finish(clients: dict[str, SecureClient], server: SecureSum, sent: list[str], helping: list[str]) -> Any:
    found = vectors()
    for name in sent:
        server.take_vector(name, clients[name].mask(7, server.sealed_for(name), found[name]).tobytes())
    for name in helping:
        server.take_unmask(name, clients[name].unmask(7, sent))
    return server.result(), sum(found[name] for name in sent)


@pytest.mark.parametrize(
    ("silent", "sent", "helping"),
    [
        ((), NAMES, NAMES),
        ((), NAMES, ["eve", "bob", "cyd"]),  # two are gone before the end
        ((), ["ann", "cyd", "dan", "eve"], ["ann", "cyd", "dan", "eve"]),  # one drops out after it shared its keys
        ((), ["ann", "cyd", "eve"], ["ann", "cyd", "eve"]),  # two do
        (("bob",), ["ann", "cyd", "dan", "eve"], ["dan", "cyd", "eve"]),  # one before that, one at the end
    ],
)
def test_the_sum_is_exact_whoever_drops_out(silent: tuple[str, ...], sent: list[str], helping: list[str]) -> None:
    clients, server = until_mask(silent=silent)
    found, expected = finish(clients, server, sent, helping)
    assert np.array_equal(found, expected)


def test_too_few_to_the_end_uncover_nothing() -> None:
    clients, server = until_mask()
    with pytest.raises(RoundError, match="needs 3 sites to the end; 2 stayed"):
        finish(clients, server, ["ann", "bob", "cyd"], ["ann", "bob"])


def test_what_the_server_gets_looks_like_noise() -> None:
    """Two runs of one client's zero vector share nothing, and every bit is set half of the time."""
    masked = []
    for _ in range(2):
        clients, server = until_mask()
        masked.append(clients["ann"].mask(7, server.sealed_for("ann"), np.zeros(LENGTH, np.int64)))
    assert not np.any(masked[0] == masked[1])
    bits = np.unpackbits(np.concatenate(masked).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.03  # 8192 bits: deviation 0.0055


def test_the_server_holds_no_single_vector() -> None:
    clients, server = until_mask()
    found = vectors()
    masked = {name: clients[name].mask(7, server.sealed_for(name), found[name]) for name in NAMES}
    for name in NAMES:
        server.take_vector(name, masked[name].tobytes())
    held = [value for value in vars(server).values() if isinstance(value, np.ndarray)]
    assert len(held) == 1
    assert np.array_equal(held[0], sum(masked.values()))


def test_a_pair_agrees_on_a_mask_and_no_third_does() -> None:
    a, b, c = SecureClient("a"), SecureClient("b"), SecureClient("c")
    public = {client.name: raw(client.keys(1)["mask"]) for client in (a, b, c)}
    private = {client.name: raw(client.state["mask"]["private"]) for client in (a, b, c)}
    assert np.array_equal(pair_mask(private["a"], public["b"], 9), pair_mask(private["b"], public["a"], 9))
    assert not np.array_equal(pair_mask(private["a"], public["b"], 9), pair_mask(private["a"], public["c"], 9))


def test_the_keystream_is_chacha20() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, counter and nonce of zeros."""
    expected = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert keystream(bytes(32), 4).tobytes() == expected


def test_a_stage_runs_once_and_in_order() -> None:
    """A second vector under one mask, or both kinds of shares of one client, would uncover it."""
    clients, server = until_mask()
    ann = clients["ann"]
    with pytest.raises(SiteRefusal, match="'unmask' of round 7 does not follow 'shares'"):
        ann.unmask(7, NAMES)
    with pytest.raises(SiteRefusal, match="of round 8 does not follow"):
        ann.mask(8, server.sealed_for("ann"), vectors()["ann"])
    ann.mask(7, server.sealed_for("ann"), vectors()["ann"])
    with pytest.raises(SiteRefusal, match="does not follow 'mask'"):
        ann.mask(7, server.sealed_for("ann"), vectors()["ann"])
    ann.unmask(7, NAMES)
    with pytest.raises(SiteRefusal, match="does not follow 'unmask'"):
        ann.unmask(7, ["ann", "bob", "cyd"])
    assert set(ann.state) == {"stage", "round"}  # no secret is left


def test_a_client_refuses_what_would_uncover_it() -> None:
    clients, server = until_mask()
    ann, bob = clients["ann"], clients["bob"]
    ann.mask(7, server.sealed_for("ann"), vectors()["ann"])
    with pytest.raises(SiteRefusal, match="only 2 sites stayed; 3 are needed"):
        ann.unmask(7, ["ann", "bob"])
    bob.mask(7, server.sealed_for("bob"), vectors()["bob"])
    with pytest.raises(SiteRefusal, match="not of this round"):
        bob.unmask(7, ["ann", "cyd", "dan"])
    alone = SecureClient("ann")
    keys = {"ann": alone.keys(1), "x": SecureClient("x").keys(1)}
    with pytest.raises(SiteRefusal, match="too few to be safe"):
        alone.shares(1, keys, 2)
    other = SecureClient("ann")
    other.keys(1)
    with pytest.raises(SiteRefusal, match="lacks this site's own"):
        other.shares(1, keys | {"y": SecureClient("y").keys(1)}, 2)
    cyd = clients["cyd"]
    wrong = server.sealed_for("cyd") | {"dan": server.sealed_for("eve")["dan"]}  # meant for somebody else
    cyd.mask(7, wrong, vectors()["cyd"])
    with pytest.raises(SiteRefusal, match="shares of dan cannot be decrypted"):
        cyd.unmask(7, NAMES)


def test_a_peers_name_cannot_write_into_the_log() -> None:
    evil = "dan\x1b[2J\nINFO: all is well"
    clients = {name: SecureClient(name) for name in ("ann", "bob", evil)}
    keys = {name: client.keys(7) for name, client in clients.items()}
    sealed = {name: client.shares(7, keys, 2) for name, client in clients.items()}
    ann = clients["ann"]
    ann.mask(7, {"bob": sealed["bob"]["ann"], evil: sealed["bob"][evil]}, vectors()["ann"])
    with pytest.raises(SiteRefusal) as refused:
        ann.unmask(7, ["ann", "bob", evil])
    assert str(refused.value) == r"the shares of dan\x1b[2J\nINFO: all is well cannot be decrypted"


def test_the_server_refuses_malformed_answers() -> None:
    clients, server = until_mask()
    with pytest.raises(UpdateRejected, match="masked vector has 8 bytes, expected 512"):
        server.take_vector("ann", bytes(8))
    assert not server.total.any()
    assert server.survivors == []
    with pytest.raises(UpdateRejected, match="did not share its keys with every other"):
        server.take_shares("ann", {"bob": "AA=="})
    with pytest.raises(UpdateRejected, match="no two public keys"):
        server.take_keys("ann", {"cipher": "AA=="})
    with pytest.raises(UpdateRejected, match="public key cannot be read"):
        server.take_keys("ann", {"cipher": "AA==", "mask": "AA=="})
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    wrong = text(other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(UpdateRejected, match="not on the curve P-384"):
        server.take_keys("ann", {"cipher": wrong, "mask": wrong})
    named = raw(server.keys["bob"]["mask"]).splitlines()
    der = bytearray(base64.b64decode(b"".join(named[1:-1])))
    der[19] ^= 1  # the last byte of the curve's name: P-384 becomes a curve that nobody knows
    unknown = text(b"\n".join([named[0], base64.b64encode(der), named[-1]]))
    with pytest.raises(UpdateRejected, match="public key cannot be read"):
        server.take_keys("ann", {"cipher": unknown, "mask": unknown})
    with pytest.raises(UpdateRejected, match="not base64"):
        server.take_keys("ann", {"cipher": "?", "mask": "AA=="})
    with pytest.raises(UpdateRejected, match="not short text"):
        server.take_keys("ann", {"cipher": "A" * (1 << 20), "mask": "AA=="})
    with pytest.raises(UpdateRejected, match="a share for every site"):
        server.take_unmask("ann", {})
    found = vectors()
    for name in NAMES:
        server.take_vector(name, clients[name].mask(7, server.sealed_for(name), found[name]).tobytes())
    for name in NAMES:
        shares = clients[name].unmask(7, NAMES)
        server.take_unmask(name, shares | ({"bob": "AAAA"} if name == "ann" else {}))
    with pytest.raises(RoundError, match="do not fit together"):
        server.result()


def test_a_client_goes_on_from_what_it_wrote_down() -> None:
    clients, server = until_mask()
    again = {name: SecureClient(name, json.loads(json.dumps(client.state))) for name, client in clients.items()}
    found, expected = finish(again, server, NAMES, NAMES)
    assert np.array_equal(found, expected)


def test_the_threshold_by_hand() -> None:
    assert [threshold_of(2 / 3, n) for n in (3, 4, 6, 20)] == [2, 3, 4, 14]
    assert threshold_of(1.0, 5) == 5


# Integers.

SHAPES = {"experts/0/x.lora_A": (2, 3), "experts/1/x.lora_A": (2, 3), "router/w": (4,)}


def test_a_vector_by_hand() -> None:
    layout = Layout({"router/w": (2,), "experts/0/a": (1,)})
    tensors = {"router/w": torch.tensor([0.5, -0.25])}
    vector = layout.write(tensors, {"examples": 3, "router": 3}, loss=2.0, most=9)
    one = 1 << 32
    assert vector.tolist() == [0, 0, 3, 1, 3 * 2 * one, 3, 0, 3 * one // 2, -3 * one // 4]
    weights, clients, loss, sums = layout.read(vector)
    assert (weights, clients, loss) == ({"experts/0": 0, "router": 3}, {"experts/0": 0, "router": 1}, (6.0, 3))
    assert sums["router/w"].tolist() == [1.5, -0.75]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 10)), min_size=1, max_size=6))
def test_the_mean_is_that_of_float64_but_for_the_last_place(clients: list[tuple[int, float]]) -> None:
    layout, total, expected = Layout(SHAPES), 0, torch.zeros(4).double()
    for seed, (weight, scale) in enumerate(clients):
        update = scale * torch.randn(4, generator=torch.Generator().manual_seed(seed)).clamp(-5, 5)
        total = total + layout.write({"router/w": update}, {"router": weight, "examples": weight}, None, HEAVIEST)
        expected += weight * update.double()
    weights, _, _, sums = layout.read(np.asarray(total))
    heavy = sum(weight for weight, _ in clients)
    assert weights["router"] == heavy
    assert ((sums["router/w"] - expected) / heavy).abs().max() <= 2.0**-33 * 1.01


def test_shares_of_a_key_of_another_kind_end_the_round_by_name() -> None:
    """Ann shares what she likes and drops out; the server takes the shares together for a key."""
    clients = {name: SecureClient(name) for name in NAMES}
    server = SecureSum(3, LENGTH)
    for name, client in clients.items():
        server.take_keys(name, client.keys(7))
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    clients["ann"].state["mask"]["private"] = text(other)
    for name, client in clients.items():
        server.take_shares(name, client.shares(7, server.keys, 3))
    with pytest.raises(RoundError, match="do not fit together"):
        finish(clients, server, NAMES[1:], NAMES[1:])


def test_the_heaviest_clients_do_not_overflow() -> None:
    layout = Layout({"router/w": (1,)})
    most = HEAVIEST // 4
    one = layout.write({"router/w": torch.tensor([LARGEST])}, {"router": most, "examples": most}, 64.0, most)
    _, _, loss, sums = layout.read(4 * one)
    assert float(sums["router/w"]) == 4 * most * LARGEST
    assert loss[0] / loss[1] == 64.0


@pytest.mark.parametrize(
    ("value", "weight", "why"),
    [(65.0, 1, "not within"), (float("nan"), 1, "not within"), (1.0, 11, "weight of 'router' is beyond 10")],
)
def test_what_does_not_fit_is_refused_by_name(value: float, weight: int, why: str) -> None:
    with pytest.raises(UpdateRejected, match=why):
        Layout({"router/w": (1,)}).write({"router/w": torch.tensor([value])}, {"router": weight}, None, most=10)
