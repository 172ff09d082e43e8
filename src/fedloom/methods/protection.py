"""What protects clients: differential privacy and secure aggregation, which take from a round a sum alone."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Section
from fedloom.methods.server import ServerStep


class Privacy(Section):
    """The section ``privacy``: client-level differential privacy of what the server makes of a round (docs/privacy.md).

    Attributes:
        clip: ℓ2 bound of a client's whole update.
        noise: standard deviation of the noise on the sum of updates, in units of ``clip``.
        delta: δ at which ε is stated.
        target: ε before which the run stops; None does not stop it.
        accountant: ``rdp`` (Mironov, arXiv 1702.07476) or ``prv`` (Gopi et al., arXiv 2106.02848), both of Opacus.
        probe_clip: ℓ2 bound of what a client sends before round 1, for methods that ask.
        probe_noise: standard deviation of each client's own noise on that, in units of ``probe_clip``.
        warn: noise beyond this many times the signal is worth a warning.
        reproducible: all noise and the choice of clients come from the run's seed, which protects nobody.
    """

    clip: float = Field(gt=0, le=1e9)
    noise: float = Field(ge=0, le=1e9)
    delta: float = Field(1e-5, gt=0, lt=1)
    target: float | None = Field(None, gt=0)
    accountant: Literal["rdp", "prv"] = "rdp"
    probe_clip: float | None = Field(None, gt=0, le=1e9)
    probe_noise: float | None = Field(None, ge=0, le=1e9)
    warn: float = Field(1.0, gt=0)
    reproducible: bool = False

    def check(self, method: Method, server: ServerStep) -> None:
        """Refuse what could not be protected.

        Raises:
            ConfigError: naming the method or option, and the reason.
        """
        check_summed("privacy", method, server)
        if not server.uniform(method):
            raise ConfigError(
                "privacy: weights by examples tell how many a client has, and let one client move the model further "
                "than the noise allows for. Set server.weights to 'uniform'."
            )
        if method.has_probe and (self.probe_clip is None or self.probe_noise is None):
            raise ConfigError(
                f"privacy: {method.title} asks every client for signatures before round 1, which must be clipped and "
                "noised too: give privacy.probe_clip and privacy.probe_noise."
            )
        if (reason := method.tells()) is not None:
            raise ConfigError(f"privacy: {method.title} cannot be protected so: {reason}.")


class SecureAggregation(Section):
    """The section ``secagg``: the server sees sums of updates only (docs/privacy.md).

    Attributes:
        threshold: share of a round's clients that must stay to its end; as many together could uncover one.
        min_contributors: an expert or router to which fewer contribute is not updated in that round.
        reveal_signatures: clients may be asked one by one before round 1, though the server sees what they answer.
    """

    threshold: float = Field(2 / 3, gt=0.5, le=1)
    min_contributors: int = Field(3, ge=2)
    reveal_signatures: bool = False

    def check(
        self, method: Method, server: ServerStep, wire: str, privacy: Privacy | None, participation: float
    ) -> None:
        """Refuse what cannot be summed so.

        Raises:
            ConfigError: naming the method or option, and the reason.
        """
        check_summed("secagg", method, server)
        if wire != "none":
            raise ConfigError(f"secagg: a masked sum cannot be compressed. Leave federation.wire ({wire!r}) at 'none'.")
        if privacy is not None and participation < 1:
            raise ConfigError(
                "secagg with privacy: where chance draws too few for one sum, nobody's update counts, so that one more "
                "client decides on the others' too, which ε does not allow for. Set federation.participation to 1."
            )
        if method.has_probe and not self.reveal_signatures and privacy is None:
            raise ConfigError(
                f"secagg: {method.title} compares the clients' signatures before round 1, one by one, which no sum can "
                "replace. Set secagg.reveal_signatures to let the server see them, or add noise to them (privacy)."
            )


def check_summed(section: str, method: Method, server: ServerStep) -> None:
    """Refuse a server rule that needs more than sums.

    Raises:
        ConfigError: naming the method or option, and the reason.
    """
    if not method.summed:
        raise ConfigError(f"{section}: {method.title} cannot be run so: {method.singles}.")
    for option, value, plain in (
        ("aggregation", server.aggregation, "factors"),
        ("conflict", server.conflict, "none"),
        ("importance", server.importance, "samples"),
    ):
        if value != plain:
            raise ConfigError(f"{section}: server.{option} '{value}' works on single updates. Leave it at '{plain}'.")
