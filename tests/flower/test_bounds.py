"""What a server, honest or not, can make a site do: one thing at a time, within its limits, on a bounded disk."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import terms_of, write_sites

from fedloom.errors import SiteRefusal, UpdateRejected
from fedloom.methods import METHODS
from fedloom.runtime import flower_site, turns
from fedloom.runtime import site as site_module
from fedloom.runtime.flower_messages import pack, unpack
from fedloom.runtime.loop import make_orders
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.secagg import MOST_CLIENTS, SecureClient
from fedloom.runtime.secure_client import Work, frame, unframe
from fedloom.runtime.site import Site, Terms, load_site
from fedloom.runtime.turns import WAITING, in_turn
from fedloom.runtime.wire import encode_order
from fedloom.types import AdapterSpec, Order
from small_world import TRAINING, World

pytestmark = pytest.mark.skipif(turns.fcntl is None, reason="this system has no file locks")


@pytest.fixture
def ann(backbone_folder: Path, tmp_path: Path) -> Site:
    return Site(load_site(write_sites(tmp_path / "sites", backbone_folder)[0].config))


def in_threads(*calls: Any) -> list[Any]:
    """Return what the calls return or raise, made at once."""
    found: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            found[index] = calls[index]()
        except SiteRefusal as error:
            found[index] = error

    threads = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_messages_are_answered_one_at_a_time_and_few_wait(tmp_path: Path) -> None:
    at_work, most = 0, 0

    def answer() -> str:
        nonlocal at_work, most
        with in_turn(tmp_path, "work"):
            at_work += 1
            most = max(most, at_work)
            time.sleep(0.3)
            at_work -= 1
        return "answered"

    found = in_threads(*[answer] * (WAITING + 3))
    assert most == 1
    assert found.count("answered") == WAITING + 1
    refused = [str(error) for error in found if error != "answered"]
    assert refused == ["5 other messages are being answered; try again later"] * 2
    assert answer() == "answered"  # and nothing stays locked


def test_a_server_that_starts_again_is_greeted_while_a_site_trains(tmp_path: Path) -> None:
    with in_turn(tmp_path, "work"), in_turn(tmp_path, "hello"):
        pass


def test_a_mask_hides_one_vector_only_however_many_ask_at_once(
    ann: Site, backbone_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two vectors under one mask would tell their difference: of an update and of none, the update."""
    terms = terms_of("fedit", backbone_folder)
    others = {name: SecureClient(name) for name in ("bob", "cyd")}
    own = unframe(ann.secure(frame({"stage": "keys", "round": 1}), terms)[0])[0]["keys"]
    keys = {"ann": own} | {name: client.keys(1) for name, client in others.items()}
    ann.secure(frame({"stage": "shares", "round": 1, "keys": keys, "threshold": 2}), terms)
    sealed = {name: client.shares(1, keys, 2)["ann"] for name, client in others.items()}

    def work(method: Any, client: Any, order: Order, plan: Any, leaving: Any) -> Work:
        time.sleep(0.3)
        return Work(np.array([7, 8, 9], np.int64), None)

    monkeypatch.setattr(site_module, "work_for_sum", work)
    monkeypatch.setattr(ann, "_read", lambda body: SimpleNamespace(kind="fit", round=1))
    monkeypatch.setattr(ann, "_client", lambda order, terms: None)
    monkeypatch.setattr(flower_site, "_config", lambda path: ann.config)
    monkeypatch.setattr(flower_site, "_site", lambda path: ann)
    message = frame({"stage": "mask", "round": 1, "sealed": sealed, "units": [], "clients": 3}, b"order")

    def ask() -> dict[str, Any]:
        content = pack({"terms": terms.model_dump()}, message)
        done = flower_site._answered(content, {}, lambda s, t, p: pack({"kept": False}, s.secure(p, t)[0]))
        return unpack(done, 1 << 20)[0]

    answers = in_threads(ask, ask)
    assert sum("refused" in about for about in answers) == 1
    assert any("stage" in about.get("refused", "") for about in answers)


def test_the_keys_of_a_sum_are_counted_and_looked_at_before_any_work() -> None:
    def shares(keys: dict[str, Any]) -> None:
        client = SecureClient("ann")
        client.shares(1, keys | {"ann": client.keys(1)}, 2)

    other = SecureClient("bob").keys(1)
    start = time.monotonic()
    with pytest.raises(SiteRefusal, match=f"{MOST_CLIENTS + 1} sites in one sum; {MOST_CLIENTS} are the most"):
        shares({f"site-{i}": other for i in range(MOST_CLIENTS)})
    assert time.monotonic() - start < 5.0  # sharing among so many takes far longer
    with pytest.raises(SiteRefusal, match="the keys of 'bob' have not the form of keys"):
        shares({"bob": other | {"more": "x" * 1000}, "cyd": other})
    with pytest.raises(UpdateRejected, match="public key"):
        shares({"bob": other | {"mask": "AAAA"}, "cyd": other})


def test_secrets_of_few_runs_are_kept_and_what_a_kill_leaves_of_them_is_not(ann: Site, backbone_folder: Path) -> None:
    ann.config = ann.config.model_copy(update={"limits": ann.config.limits.model_copy(update={"max_runs": 2})})
    folder, begin = Path(ann.config.folder), frame({"stage": "keys", "round": 1})
    for number in (0, 1, 0, 1):
        ann.secure(begin, terms_of("fedit", backbone_folder, run=f"{number:016x}"))
    with pytest.raises(SiteRefusal, match=r"secure rounds of 2 runs already \(max_runs\)"):
        ann.secure(begin, terms_of("fedit", backbone_folder, run=f"{2:016x}"))
    torn = folder / f".{1:016x}.secrets.json.abc"  # as a kill between writing and renaming leaves it
    torn.write_text("PRIVATE KEY")
    ann.hello(terms_of("fedit", backbone_folder))
    assert not list(folder.glob("*secrets*"))
    assert not torn.exists()


def keep(site: Site, terms: Terms, round: int) -> None:
    site._keep(terms, round, ClientMemory())


def test_a_site_keeps_a_few_memories_whatever_rounds_a_server_names(ann: Site, backbone_folder: Path) -> None:
    terms = terms_of("fedit", backbone_folder)
    folder = Path(ann.config.folder) / terms.run
    for round in range(50, 0, -1):
        keep(ann, terms, round)
        assert len(list(folder.iterdir())) == 1  # the later ones will be written anew
    (folder / ".ann-r1.safetensors.abc").write_text("torn")
    for round in range(1, 6):
        keep(ann, terms, round)
    assert sorted(path.name for path in folder.iterdir()) == [f"ann-r{round}.safetensors" for round in (3, 4, 5)]


def test_runs_that_are_kept_are_counted_and_nothing_else(ann: Site, backbone_folder: Path) -> None:
    ann.config = ann.config.model_copy(update={"limits": ann.config.limits.model_copy(update={"max_runs": 1})})
    (Path(ann.config.folder) / ".programs").mkdir(parents=True)  # of ``fedloom flower node``
    keep(ann, terms_of("fedit", backbone_folder, run="1" * 16), 1)
    keep(ann, terms_of("fedit", backbone_folder, run="1" * 16), 2)
    with pytest.raises(SiteRefusal, match=r"max_runs: 1"):
        keep(ann, terms_of("fedit", backbone_folder, run="2" * 16), 1)
    ann._keep(terms_of("fedit", backbone_folder, run="3" * 16), 1, None)  # a method that keeps nothing


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"warmup_steps": 1000, "max_buckets": 300}, r"asks for 8000 steps; this site's limit is 7999"),  # 8 examples
        ({"warmup_batch": 100_000}, r"100000 wide; this site's limit \(max_width\) is 4096"),
    ],
)
def test_a_probe_counts_the_steps_of_all_its_buckets(
    options: dict[str, Any], reason: str, ann: Site, backbone_folder: Path, tmp_path: Path
) -> None:
    ann.config = ann.config.model_copy(update={"limits": ann.config.limits.model_copy(update={"max_steps": 7999})})
    method = METHODS["fedweave"]()
    (order,) = make_orders(method, "probe", method.init(World(tmp_path / "world").setup), ["ann"], TRAINING)
    with pytest.raises(SiteRefusal, match=reason):
        ann.answer(encode_order(order), terms_of("fedweave", backbone_folder, options=options))


def test_pfl_moe_counts_the_passes_over_a_clients_own_head_and_gate() -> None:
    """9 examples in batches of 2 are 5 steps a pass; 10 + 20 passes are 150, beside the 3 that the order names."""
    method = METHODS["pfl_moe"](METHODS["pfl_moe"].Options(after=1, head_epochs=10, gate_epochs=20))
    order = Order("fit", "ann", 1, {}, AdapterSpec(()), replace(TRAINING, steps=3, batch_size=2))
    assert method.effort(order, 9).steps == 3
    assert method.effort(replace(order, round=2), 9).steps == 3 + 150


def test_a_round_beyond_all_rounds_is_refused(ann: Site, backbone_folder: Path, tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    (order,) = make_orders(method, "fit", method.init(World(tmp_path / "world").setup), ["ann"], TRAINING)
    with pytest.raises(SiteRefusal, match="round 10000000000 is unknown"):
        ann.answer(encode_order(replace(order, round=10**10)), terms_of("fedit", backbone_folder))
