"""One file per paper. ``METHODS`` is the registry: a method exists by its line here."""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.methods.centralised import Centralised
from fedloom.methods.fedit import FedIT
from fedloom.methods.fedweave import FedWeave
from fedloom.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "centralised": Centralised,
    "fedit": FedIT,
    "fedweave": FedWeave,
    "local": Local,
}
