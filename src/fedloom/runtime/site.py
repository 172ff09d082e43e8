"""One site of a federation: its own rows, backbone, memory and limits. The server says what to train, not with what."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from fedloom.backbones.context import check_length
from fedloom.backbones.load import cache_dir, load_backbone
from fedloom.config import BackboneConfig, Section, explained
from fedloom.config_file import read_yaml
from fedloom.data.sources import read_examples
from fedloom.data.tokenize import encode, tokenizer_hash
from fedloom.errors import SiteRefusal
from fedloom.files import write_private
from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.methods.protection import Privacy
from fedloom.runtime.client import LocalClient, Rows, Workbench
from fedloom.runtime.leaving import Leaving, leave
from fedloom.runtime.memory import ClientMemory, MemoryFolder, check_client_name
from fedloom.runtime.secagg import SecureClient
from fedloom.runtime.secure_client import Work, answer, work_for_sum
from fedloom.runtime.wire import decode_order
from fedloom.types import AdapterSpec, Order, Plain, Training, Wire
from fedloom.version import __version__

#: A server that starts again goes on from one of its two checkpoints, which name memories of earlier rounds.
KEEP_VERSIONS = 3

#: So that the name of a memory has a length.
MOST_ROUNDS = 10**9

_SPEC, _TRAINING = TypeAdapter(AdapterSpec), TypeAdapter(Training)

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Limits(Section):
    """What a site does for a server, at most.

    ``max_width`` bounds what an order can make it allocate: the summed rank of all experts, the summed width of the
    routers, the slots, and the examples of a batch. ``max_seconds`` bounds the work for any one message, and
    ``max_runs`` the runs whose memories are kept. ``only_sums``: whatever the server asks for, updates leave in secure
    sums only, and nothing that a method asks for before round 1 leaves, unless ``signatures`` is true.
    """

    max_steps: int = Field(10_000, ge=1)
    max_width: int = Field(4096, ge=1)
    max_seconds: int = Field(86_400, ge=1)
    max_runs: int = Field(100, ge=1)
    max_order_bytes: int = Field(2 << 30, ge=1)
    only_sums: bool = False
    signatures: bool = False


class SiteConfig(Section):
    """A node's own configuration. ``folder`` holds what never leaves the site."""

    client: str
    data: str
    folder: str = "memory"
    backbone: BackboneConfig = BackboneConfig()
    max_length: int = Field(512, ge=8, le=1_000_000)
    strict: bool = False
    limits: Limits = Limits()


def load_site(path: Path) -> SiteConfig:
    """Read a node's configuration; relative names are relative to its folder.

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    plain = read_yaml(path)
    try:
        config = SiteConfig.model_validate(plain)
    except ValidationError as error:
        raise explained(error, SiteConfig, (), str(path)) from error
    check_client_name(config.client)
    placed = {key: str((path.parent / Path(getattr(config, key)).expanduser()).resolve()) for key in ("data", "folder")}
    return config.model_copy(update=placed)


class Terms(Section):
    """What the server says beside an order. It comes from outside, so every field has a form.

    Attributes:
        run: name of the run, under which the site keeps its memory.
        seed: the run's seed.
        method: name of a method that the site has.
        options: that method's options.
        backbone: hash of the server's backbone.
        tokenizer: hash of its tokenizer.
        memory: round of the memory to go on from; None is none.
        wire, feedback, privacy, uniform: how a reply leaves; see ``runtime.leaving``.
    """

    run: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    seed: int
    method: str
    options: dict[str, Any] = Field(default_factory=dict)
    backbone: Digest
    tokenizer: Digest
    memory: int | None = Field(None, ge=0, le=MOST_ROUNDS)
    wire: Wire = "none"
    feedback: bool = False
    privacy: Privacy | None = None
    uniform: bool = False

    def leaving(self) -> Leaving:
        return Leaving(self.wire, self.feedback, self.privacy, self.uniform)

    def build_method(self) -> Method:
        """Return the method, of the code that is installed here.

        Raises:
            SiteRefusal: there is no such method, or it has no such options.
        """
        if self.method not in METHODS:
            raise SiteRefusal(f"this site has no method {self.method!r}; it runs fedloom {__version__}")
        kind = METHODS[self.method]
        try:
            return kind(kind.Options(**self.options))
        except ValidationError as error:
            said = f"this site's fedloom {__version__} does not take these options of {self.method}"
            raise SiteRefusal(said) from error


def check_form(order: Order) -> None:
    """Refuse an order whose header, which is any JSON, has other types than those of an order, or absurd numbers.

    Raises:
        SiteRefusal: naming the fields.
    """
    spec, training = order.spec, order.training
    try:
        _SPEC.validate_json(json.dumps(vars(spec)), strict=True)
        _TRAINING.validate_json(json.dumps(vars(training)), strict=True)
    except ValidationError as error:
        fields = ", ".join(sorted({str(fault["loc"][0]) for fault in error.errors()}))
        raise SiteRefusal(f"the order has fields of a wrong type: {fields}") from error
    least = {"rank": 1, "experts": 1, "router_hidden": 0, "routers": 1, "steps": 0, "epochs": 0, "batch_size": 1}
    numbers = vars(spec) | vars(training)
    if low := sorted(name for name, value in least.items() if numbers[name] < value):
        raise SiteRefusal(f"the order has numbers that are too small: {', '.join(low)}")
    if not isinstance(order.values, dict):
        raise SiteRefusal("the order's values are not an object")


def mismatch(what: str, here: str, server: str) -> str | None:
    """Return what is said when a hash differs between a site and the server; both hashes are named."""
    return None if here == server else f"the {what} differs: {here} at the site, {server} at the server"


class Site:
    """Rows and backbone of one node, loaded once."""

    def __init__(self, config: SiteConfig) -> None:
        if config.backbone.threads:
            torch.set_num_threads(config.backbone.threads)
        self.config = config
        self.backbone = load_backbone(config.backbone.name, dtype=config.backbone.dtype, device=config.backbone.device)
        self.tokenizer_hash = tokenizer_hash(self.backbone.tokenizer)
        check_length(self.backbone, config.max_length, logging.getLogger("flwr").info, "max_length")
        examples, self.counts = read_examples(config.data, strict=config.strict)
        kept, self.encoding = encode(
            examples, self.backbone.tokenizer, max_length=config.max_length, strict=config.strict
        )
        self.rows = Rows(kept)
        self._bench: Workbench | None = None

    def check(self, terms: Terms) -> None:
        """Refuse a server that trains another model.

        Raises:
            SiteRefusal: naming both hashes.
        """
        for what, here, server in (
            ("backbone", self.backbone.hash, terms.backbone),
            ("tokenizer", self.tokenizer_hash, terms.tokenizer),
        ):
            if (said := mismatch(what, here, server)) is not None:
                raise SiteRefusal(said)

    def hello(self, terms: Terms) -> dict[str, Plain]:
        """Return what the server may know of this site: its name, hashes and, without privacy, counts.

        Raises:
            SiteRefusal: see ``check``, or there is nothing to train on.
        """
        self._forget_secrets("*")
        self.check(terms)
        if not len(self.rows):
            raise SiteRefusal(f"{self.config.client} holds no usable example")
        known = {
            "client": self.config.client,
            "fedloom": __version__,
            "backbone": self.backbone.hash,
            "tokenizer": self.tokenizer_hash,
        }
        if terms.privacy is not None:  # a number of rows tells of one row
            return known
        return known | {
            "examples": len(self.rows),
            "rows": dict(self.counts),
            "truncated": self.encoding.truncated,
            "no_label_left": self.encoding.no_label_left,
        }

    def answer(self, payload: bytes, terms: Terms) -> tuple[bytes, bool]:
        """Do what an encoded order asks.

        The same order with the same memory gives the same bytes, so a round that is asked again does no harm.

        Returns:
            The encoded reply, and whether the memory of this round was written.

        Raises:
            SiteRefusal: the order is for another client, model or method, beyond the limits, or not to be understood.
        """
        self._forget_secrets(terms.run)
        self.check(terms)
        method, order = terms.build_method(), self._read(payload)
        steps, width = method.effort(order, len(self.rows))
        if steps > self.config.limits.max_steps:
            raise SiteRefusal(f"its method asks for {steps} steps; this site's limit is {self.config.limits.max_steps}")
        self._check_width(width)
        if self.config.limits.only_sums and order.kind == "fit":
            raise SiteRefusal("this site's updates leave in secure sums only (limits.only_sums)")
        # A probe's steps and buckets are the server's choice, and so is its noise: it may be a whole update.
        if self.config.limits.only_sums and not self.config.limits.signatures:
            raise SiteRefusal("this site sends no signatures (limits.only_sums is true, limits.signatures is not)")
        encoded, kept = leave(method, self._client(order, terms), order, terms.leaving())
        self._keep(terms, order.round, kept)
        return encoded, kept is not None

    def secure(self, payload: bytes, terms: Terms) -> tuple[bytes, bool]:
        """Answer one message of a secure round; see ``runtime.secure_client``.

        The keys of the round wait in a file that only this user can read, from its first message to its last, or to
        whatever else the site is asked next.

        Returns:
            The answer, and whether the memory of this round was written.

        Raises:
            SiteRefusal: see ``answer``, or the message would uncover an update.
        """
        self.check(terms)
        method = terms.build_method()
        if not method.summed:
            raise SiteRefusal(f"{method.title} cannot be summed: {method.singles}")
        place = Path(self.config.folder) / f"{terms.run}.secrets.json"
        if len({*place.parent.glob("*.secrets.json"), place}) > (most := self.config.limits.max_runs):
            raise SiteRefusal(f"it is in secure rounds of {most} runs already (max_runs)")
        secrets = SecureClient(self.config.client, json.loads(place.read_bytes()) if place.is_file() else None)
        round = 0

        def work(body: bytes, plan: dict[str, Plain]) -> Work:
            nonlocal round
            order = self._read(body)
            if order.kind != "fit" or order.round != plan["round"]:
                raise SiteRefusal(f"the order is for {order.kind!r} of round {order.round}, in another secure round")
            round = order.round
            return work_for_sum(method, self._client(order, terms), order, plan, terms.leaving())

        encoded, kept = answer(secrets, payload, work)
        if "round" in secrets.state and len(secrets.state) > 2:
            write_private(place, json.dumps(secrets.state).encode())
        else:  # nothing secret is left
            place.unlink(missing_ok=True)
        self._keep(terms, round, kept)
        return encoded, kept is not None

    def _forget_secrets(self, run: str) -> None:
        """Delete what is left of a secure round that ended early, of one run or of all (``*``)."""
        folder = Path(self.config.folder)
        for pattern in (f"{run}.secrets.json", f".{run}.secrets.json.*"):  # the second is left where writing was killed
            for place in folder.glob(pattern):
                place.unlink(missing_ok=True)

    def _client(self, order: Order, terms: Terms) -> LocalClient:
        memory = MemoryFolder(Path(self.config.folder) / terms.run)
        return LocalClient(
            name=self.config.client,
            rows=self.rows,
            bench=self._bench_for(order.spec),
            memory=self._memory(memory, terms.memory),
            run_seed=terms.seed,
            round=order.round,
        )

    def _keep(self, terms: Terms, round: int, kept: ClientMemory | None) -> None:
        if kept is None:
            return
        folder, most = Path(self.config.folder), self.config.limits.max_runs
        known = [path.name for path in folder.glob("*") if re.fullmatch("[0-9a-f]{16}", path.name)]
        if terms.run not in known and len(known) >= most:
            raise SiteRefusal(
                f"{self.config.client} keeps the memories of as many runs as it may (max_runs: {most}); whoever looks "
                "after the site can delete those of runs that are over"
            )
        memory = MemoryFolder(folder / terms.run)
        memory.write(self.config.client, round, kept)
        self._forget(memory, round, terms.memory)

    def _read(self, payload: bytes) -> Order:
        limits = self.config.limits
        try:
            order = decode_order(payload)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SiteRefusal(f"the order cannot be understood: {type(error).__name__}") from error
        if order.client != self.config.client:
            raise SiteRefusal(f"the order is for {order.client!r}; this site is {self.config.client!r}")
        if order.kind not in ("probe", "fit") or type(order.round) is not int or not 0 <= order.round <= MOST_ROUNDS:
            raise SiteRefusal(f"the order's kind {order.kind!r} or round {order.round!r} is unknown")
        check_form(order)
        if order.training.steps > limits.max_steps:
            raise SiteRefusal(
                f"the order asks for {order.training.steps} steps; this site's limit is {limits.max_steps}"
            )
        spec = order.spec
        widths = spec.experts * spec.rank, spec.routers * spec.router_hidden, len(spec.slots), order.training.batch_size
        self._check_width(max(widths))
        return order

    def _check_width(self, width: int) -> None:
        if width > (most := self.config.limits.max_width):
            raise SiteRefusal(f"the order is {width} wide; this site's limit (max_width) is {most}")

    def _bench_for(self, spec: AdapterSpec) -> Workbench:
        if self._bench is None:
            self._bench = Workbench(self.backbone, spec, cache_dir())
        return self._bench

    def _memory(self, folder: MemoryFolder, round: int | None) -> ClientMemory:
        """Read the memory of a round; only its round comes from outside, never a name."""
        if round is None:
            return ClientMemory()
        version = version_of(self.config.client, round)
        if not (folder.folder / version).is_file():
            raise SiteRefusal(f"{self.config.client} has lost its memory of round {round}")
        return folder.read(version)

    def _forget(self, folder: MemoryFolder, round: int, named: int | None) -> None:
        """Delete all but the memories that a checkpoint of a server at ``round`` can name: later ones are written anew.

        A server that has had no answer in time for some rounds still goes on from the memory that it ``named``.
        """
        names = [path.name for path in folder.folder.iterdir()]
        past = sorted((of, name) for name in names if (of := round_of(name)) is not None and of <= round)
        known = [name for of, name in past if named is not None and of <= named][-(KEEP_VERSIONS - 1) :]
        folder.forget_all_but({name for _, name in past[-KEEP_VERSIONS:]} | set(known))


def version_of(client: str, round: int) -> str:
    """Return the name under which ``MemoryFolder`` keeps a client's memory of a round."""
    return f"{client}-r{round}.safetensors"


def round_of(version: str) -> int | None:
    """Return the round that the name of a memory ends with."""
    found = re.search(r"-r(\d{1,10})\.safetensors$", version)
    return int(found[1]) if found else None
