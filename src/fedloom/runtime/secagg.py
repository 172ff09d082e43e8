"""Secure aggregation: the server learns the sum of the clients' vectors, and of no smaller set of them.

K. Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, Figure 4, for
honest-but-curious parties, in four stages: keys, shares, mask, unmask. Every pair of clients shares a mask (SecAgg+,
Bell et al., CCS 2020, thins that out for thousands of clients; here all pairs are kept). No cryptography is made here:
key agreement, encryption and secret sharing are Flower's (``flwr.common.secure_aggregation``); a mask is the keystream
of ChaCha20 of ``cryptography``. Flower's own generator folds a key to 32 bits, which can be tried out one by one.

Both sides are state machines without a transport. Vectors are int64 and add up modulo 2⁶⁴.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import RoundError, SiteRefusal, UpdateRejected
from fedloom.runtime.quarantine import printable
from fedloom.types import Plain

Vector = NDArray[np.int64]

STAGES = ("keys", "shares", "mask", "unmask")
#: A message longer than this, for each other client, is no share.
MAX_SHARE = 1 << 14


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw(encoded: Plain) -> bytes:
    """Undo ``text``.

    Raises:
        UpdateRejected: it is no such text, or too long.
    """
    if not isinstance(encoded, str) or len(encoded) > MAX_SHARE:
        raise UpdateRejected("a key or share is not short text")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise UpdateRejected("a key or share is not base64") from error


def keystream(key: bytes, count: int) -> Vector:
    """Return ``count`` pseudo-random numbers of a key of 32 bytes, which is used for nothing else."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<i8").astype(np.int64, copy=False)


#: Clients of one sum: each shares a mask with every other.
MOST_CLIENTS = 1000


def pair_mask(private_key: bytes, public_key: bytes, count: int) -> Vector:
    """Return the mask that two clients share; each computes it from its own private key and the other's public one."""
    return keystream(base64.urlsafe_b64decode(_agree(private_key, public_key)), count)


def _agree(private_key: bytes, public_key: bytes) -> bytes:
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    return generate_shared_key(bytes_to_private_key(private_key), bytes_to_public_key(public_key))


def _key_pair() -> dict[str, str]:
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes, public_key_to_bytes

    private, public = generate_key_pairs()
    return {"private": text(private_key_to_bytes(private)), "public": text(public_key_to_bytes(public))}


def check_public(key: bytes) -> None:
    """Refuse what is no public key of the curve that all use: no other client could go on with it.

    Raises:
        UpdateRejected: it is none.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key

    try:
        found = bytes_to_public_key(key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UpdateRejected("its public key cannot be read") from error
    if not isinstance(found, ec.EllipticCurvePublicKey) or not isinstance(found.curve, ec.SECP384R1):
        raise UpdateRejected("its public key is not on the curve P-384")


def threshold_of(share: float, participants: int) -> int:
    """Return how many clients must stay to the end: ``share`` of them, at least two."""
    return max(2, math.ceil(share * participants - 1e-9))


class SecureClient:
    """One client's side of one round. ``state`` is plain, so that it can wait between messages in the client's memory.

    A mask hides a vector only once, and shares of a client's key and of its own mask together would uncover it. So
    each stage runs once, in order; ``keys`` starts anew with new keys.
    """

    def __init__(self, name: str, state: dict[str, Plain] | None = None) -> None:
        self.name = name
        self.state = state or {}

    def keys(self, round: int) -> dict[str, Plain]:
        """Draw two key pairs and return their public halves."""
        pairs = {"cipher": _key_pair(), "mask": _key_pair()}
        self.state = {"stage": "keys", "round": round, **pairs}
        return {what: pair["public"] for what, pair in pairs.items()}

    def shares(self, round: int, keys: Mapping[str, Mapping[str, Plain]], threshold: int) -> dict[str, Plain]:
        """Draw a mask of one's own; return shares of its seed and of the mask key, encrypted for each other client."""
        from flwr.common.secure_aggregation.crypto.shamir import create_shares
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt
        from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat

        self._enter("shares", round)
        names = sorted(keys)
        if len(names) > MOST_CLIENTS:
            raise SiteRefusal(f"{len(names)} sites in one sum; {MOST_CLIENTS} are the most")
        for name in names:
            if not isinstance(keys[name], Mapping) or set(keys[name]) != {"cipher", "mask"}:
                raise SiteRefusal(f"the keys of {name!r} have not the form of keys")
            for key in keys[name].values():
                check_public(raw(key))
        if self.name not in keys or keys[self.name]["mask"] != self.state["mask"]["public"]:
            raise SiteRefusal("the list of keys lacks this site's own")
        if len(names) < 3 or not len(names) / 2 < threshold <= len(names):
            raise SiteRefusal(f"{threshold} of {len(names)} sites that could uncover a mask are too few to be safe")
        seed = os.urandom(32)
        seed_shares = create_shares(seed, threshold, len(names))
        key_shares = create_shares(raw(self.state["mask"]["private"]), threshold, len(names))
        me, sealed, own = names.index(self.name), {}, {}
        for index, peer in enumerate(names):
            if peer == self.name:
                own = {"seed": text(seed_shares[index]), "key": text(key_shares[index])}
                continue
            plain = share_keys_plaintext_concat(me, index, seed_shares[index], key_shares[index])
            key = _agree(raw(self.state["cipher"]["private"]), raw(keys[peer]["cipher"]))
            sealed[peer] = text(encrypt(key, plain))
        self.state |= {"seed": text(seed), "own": own, "threshold": threshold}
        self.state |= {"peers": {name: dict(keys[name]) for name in names if name != self.name}}
        return sealed

    def mask(self, round: int, sealed: Mapping[str, Plain], vector: Vector) -> Vector:
        """Return the vector with all masks on, for the clients whose shares came through."""
        self._enter("mask", round)
        peers = self.state["peers"]
        if unknown := sorted(sealed.keys() - peers.keys()):
            raise SiteRefusal(f"shares come from {unknown[0]!r}, who is not in the round")
        if len(sealed) + 1 < self.state["threshold"]:
            raise SiteRefusal(f"only {len(sealed) + 1} sites shared keys; {self.state['threshold']} are needed")
        self.state["sealed"] = dict(sealed)
        masked = vector + keystream(raw(self.state["seed"]), len(vector))
        for peer in sorted(sealed):
            shared = pair_mask(raw(self.state["mask"]["private"]), raw(peers[peer]["mask"]), len(vector))
            masked = masked + shared if self.name < peer else masked - shared
        return masked

    def unmask(self, round: int, survivors: Sequence[str]) -> dict[str, Plain]:
        """Return a share of the seed of every client whose vector arrived, and of the mask key of every other."""
        self._enter("unmask", round)
        sealed = self.state["sealed"]
        if self.name not in survivors or not set(survivors) <= {self.name, *sealed}:
            raise SiteRefusal("the list of sites that stayed is not of this round")
        if len(set(survivors)) < self.state["threshold"]:
            raise SiteRefusal(f"only {len(set(survivors))} sites stayed; {self.state['threshold']} are needed")
        shares = {self.name: self.state["own"]["seed"]}
        for peer in sorted(sealed):
            seed_share, key_share = self._open(peer)
            shares[peer] = text(seed_share if peer in survivors else key_share)
        self.state = {"stage": "unmask", "round": round}  # nothing of the round is needed any more
        return shares

    def _open(self, peer: str) -> tuple[bytes, bytes]:
        from cryptography.fernet import InvalidToken
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt
        from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_separate

        key = _agree(raw(self.state["cipher"]["private"]), raw(self.state["peers"][peer]["cipher"]))
        names = sorted([self.name, *self.state["peers"]])
        try:
            source, target, seed_share, key_share = share_keys_plaintext_separate(
                decrypt(key, raw(self.state["sealed"][peer]))
            )
        except InvalidToken as error:
            raise SiteRefusal(f"the shares of {printable(peer, 128)} cannot be decrypted") from error
        if (source, target) != (names.index(peer), names.index(self.name)):
            raise SiteRefusal(f"the shares of {printable(peer, 128)} are not for this site")
        return seed_share, key_share

    def _enter(self, stage: str, round: int) -> None:
        before = STAGES[STAGES.index(stage) - 1]
        if self.state.get("stage") != before or self.state.get("round") != round:
            found = f"{self.state.get('stage')!r} of round {self.state.get('round')!r}"
            raise SiteRefusal(f"stage {stage!r} of round {round} does not follow {found}")
        self.state["stage"] = stage


@dataclass
class SecureSum:
    """The server's side of one round. It holds the sum of masked vectors, and no single one.

    Attributes:
        threshold: clients that must stay to the end.
        length: numbers in a vector.
        keys: client → its public keys.
        sealed: client → for each other client, shares that only that one can read.
        survivors: whose vectors are in ``total``.
        shares: client → shares of what it takes to remove that client's masks.
        total: sum of masked vectors.
    """

    threshold: int
    length: int
    keys: dict[str, dict[str, Plain]] = field(default_factory=dict)
    sealed: dict[str, dict[str, Plain]] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    shares: dict[str, list[bytes]] = field(default_factory=dict)
    helpers: int = 0

    def __post_init__(self) -> None:
        self.total: Vector = np.zeros(self.length, np.int64)

    def take_keys(self, client: str, keys: Plain) -> None:
        if not isinstance(keys, dict) or keys.keys() != {"cipher", "mask"}:
            raise UpdateRejected("it sent no two public keys")
        for key in keys.values():
            check_public(raw(key))
        self.keys[client] = keys

    def take_shares(self, client: str, sealed: Plain) -> None:
        if not isinstance(sealed, dict) or sealed.keys() != self.keys.keys() - {client}:
            raise UpdateRejected("it did not share its keys with every other site")
        for share in sealed.values():
            raw(share)
        self.sealed[client] = sealed

    def sealed_for(self, client: str) -> dict[str, Plain]:
        return {peer: sealed[client] for peer, sealed in sorted(self.sealed.items()) if peer != client}

    def take_vector(self, client: str, data: bytes) -> None:
        """Add a masked vector to the sum.

        Raises:
            UpdateRejected: it has not the length of the others'.
        """
        if len(data) != 8 * self.length:
            raise UpdateRejected(f"its masked vector has {len(data)} bytes, expected {8 * self.length}")
        self.total += np.frombuffer(data, dtype="<i8")
        self.survivors.append(client)

    def take_unmask(self, client: str, shares: Plain) -> None:
        if not isinstance(shares, dict) or shares.keys() != self.sealed.keys():
            raise UpdateRejected("it did not send a share for every site of the round")
        found = {name: raw(share) for name, share in shares.items()}
        for name, share in found.items():
            self.shares.setdefault(name, []).append(share)
        self.helpers += 1

    def result(self) -> Vector:
        """Remove the masks and return the sum of the survivors' vectors.

        Raises:
            RoundError: too few clients helped, or their shares do not fit.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares

        if self.helpers < self.threshold:
            raise RoundError(
                f"secure aggregation needs {self.threshold} sites to the end; {self.helpers} stayed. The model is as "
                "it was before the round."
            )
        total = self.total.copy()
        try:
            for client in sorted(self.sealed):
                secret = combine_shares(self.shares[client][: self.threshold])
                if client in self.survivors:
                    total -= keystream(secret, self.length)
                    continue
                for peer in self.survivors:  # who masked for a client whose vector never came
                    shared = pair_mask(secret, raw(self.keys[peer]["mask"]), self.length)
                    total = total - shared if peer < client else total + shared
        except (ValueError, IndexError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
            # Shares may add up to anything, also to a private key of another kind.
            raise RoundError(
                f"the shares that the sites sent do not fit together ({error}). The model is as it was before the "
                "round."
            ) from error
        return total
