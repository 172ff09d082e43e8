"""Secure aggregation across sites: the bits of the simulation, and no update at the server or left at a site."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import PATIENCE, Restarts, terms_of, transport_of, write_sites
from flower_processes import result_of

from fedloom.config import parse_config
from fedloom.errors import RoundError, SiteRefusal
from fedloom.experiment import run
from fedloom.methods import METHODS
from fedloom.methods.protection import SecureAggregation
from fedloom.runtime.flower_messages import SECURE
from fedloom.runtime.loop import make_orders
from fedloom.runtime.secure_client import frame, unframe
from fedloom.runtime.site import Site, load_site
from fedloom.runtime.wire import encode_order
from marker import Marked, traces
from small_world import TRAINING, World, tree

SECTIONS = {"method": {"name": "fedit"}, "federation": {"rounds": 2}, "secagg": {"min_contributors": 3}}


def test_sites_and_simulation_give_the_same_bits(backbone_folder: Path, tmp_path: Path) -> None:
    """Keys and masks differ from run to run and leave no trace in the sum."""
    sites = Restarts(tmp_path, backbone_folder)
    sites.sections |= SECTIONS
    sites.write()
    sites.serve()
    rows = {node.config.parent.name: str(node.config.parent / "rows.jsonl") for node in sites.nodes}
    run(parse_config({**sites.sections, "data": {"clients": rows}}), tmp_path / "simulated")
    assert result_of(tmp_path / "run") == result_of(tmp_path / "simulated")
    assert not list(tmp_path.rglob("*.secrets.json"))  # nothing secret is left at a site


def test_nothing_that_reaches_the_server_holds_a_planted_marker(
    backbone_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of all messages, and all files of the server, of a run with one site that drops out on the way."""
    monkeypatch.setitem(METHODS, "fedit", Marked)
    sites = Restarts(tmp_path, backbone_folder)
    sites.sections |= {**SECTIONS, "federation": {"rounds": 1, "min_replies": 3}}
    sites.write(deadline=0.1)
    seen: list[bytes] = []

    def listen(asked: Any, reply: Any) -> Any:
        for record in (*asked.content.config_records.values(), *reply.content.config_records.values()):
            seen.extend(value for value in record.values() if isinstance(value, bytes))
        return reply

    def drop_out(asked: Any, reply: Any) -> Any:
        stage = unframe(asked.content.config_records["chunk-0"]["data"])[0]["stage"] if is_secure(asked) else None
        return None if stage == "mask" else listen(asked, reply)

    for node in sites.nodes:
        node.spoil = drop_out if node.config.parent.name == "dan" else listen
    sites.serve()
    content = b"".join(seen) + b"".join(tree(tmp_path / "run").values())
    assert not any(trace in content for trace in traces(weight=5))
    assert len(content) > 100_000


def is_secure(message: Any) -> bool:
    return bool(message.metadata.message_type == SECURE)


def test_a_site_can_insist_on_sums(backbone_folder: Path, tmp_path: Path) -> None:
    sites = Restarts(tmp_path, backbone_folder)
    sites.nodes = write_sites(tmp_path / "strict", backbone_folder, limits={"only_sums": True})
    sites.sections |= {"method": {"name": "fedit"}, "federation": {"rounds": 1}}
    sites.write()
    with pytest.raises(RoundError, match="updates leave in secure sums only"):
        sites.serve()


def test_a_site_that_insists_on_sums_sends_no_signatures_unless_it_says_so(
    backbone_folder: Path, tmp_path: Path
) -> None:
    """One bucket and many steps would make a signature a whole update."""
    (node, *_) = write_sites(tmp_path / "one", backbone_folder, limits={"only_sums": True})
    site = Site(load_site(node.config))
    options = {"max_buckets": 1, "warmup_steps": 50}
    private = {"clip": 1.0, "noise": 1.0, "probe_clip": 1.0, "probe_noise": 0.0}  # noise is the server's word
    method, world = METHODS["fedweave"](), World(tmp_path / "world")
    (order,) = make_orders(method, "probe", method.init(world.setup), ["ann"], TRAINING)
    for privacy in (None, private):
        terms = terms_of("fedweave", backbone_folder, options=options, privacy=privacy)
        with pytest.raises(SiteRefusal, match="sends no signatures"):
            site.answer(encode_order(order), terms)
    assert not (tmp_path / "one" / "ann" / "memory").exists()

    sites = Restarts(tmp_path, backbone_folder)
    sites.nodes = write_sites(tmp_path / "open", backbone_folder, limits={"only_sums": True, "signatures": True})
    sites.sections["federation"] = {"rounds": 1}
    sites.write()
    with pytest.raises(RoundError, match=r"round 1 got 0 usable replies .* secure sums only"):  # after the probe
        sites.serve()


def test_keys_wait_in_a_file_of_this_user_only(backbone_folder: Path, tmp_path: Path) -> None:
    (node, *_) = write_sites(tmp_path, backbone_folder)
    site, terms = Site(load_site(node.config)), terms_of("fedit", backbone_folder)
    answer, kept = site.secure(frame({"stage": "keys", "round": 1}), terms)
    assert unframe(answer)[0]["keys"].keys() == {"cipher", "mask"}
    assert not kept
    (secrets,) = tmp_path.rglob("*.secrets.json")
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600


def test_keys_of_a_round_that_ended_early_go_with_the_next_message_of_another_kind(
    backbone_folder: Path, tmp_path: Path
) -> None:
    (node, *_) = write_sites(tmp_path, backbone_folder)
    site, terms = Site(load_site(node.config)), terms_of("fedit", backbone_folder)
    other = terms.model_copy(update={"run": "1" * 16})

    method, world = METHODS["fedit"](), World(tmp_path / "world")
    (order,) = make_orders(method, "fit", method.init(world.setup), ["somebody else"], TRAINING)

    def left() -> list[str]:
        return sorted(path.name[0] for path in tmp_path.rglob("*.secrets.json"))

    for of in (terms, other):
        site.secure(frame({"stage": "keys", "round": 1}), of)
    assert left() == ["0", "1"]
    with pytest.raises(SiteRefusal, match="for 'somebody else'"):
        site.answer(encode_order(order), terms)  # runs may go on side by side
    assert left() == ["1"]
    site.secure(frame({"stage": "keys", "round": 1}), terms)
    site.hello(terms)  # a run starts or goes on
    assert left() == []


def test_one_silent_site_costs_nothing_but_itself(backbone_folder: Path, tmp_path: Path) -> None:
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    results = []
    for silent in (True, False):
        world = World(tmp_path / str(silent))
        for node in nodes:
            node.spoil = lambda asked, reply: reply
        if silent:
            nodes[1].spoil = lambda asked, reply: None if is_secure(asked) else reply
        patience = replace(PATIENCE, minimum=3, deadline=0.1)
        transport, _ = transport_of(world, nodes, terms_of("fedit", backbone_folder), patience)
        transport.gather()
        secagg = SecureAggregation(min_contributors=3)
        world.run(METHODS["fedit"](), rounds=1, transport=transport, secagg=secagg)
        results.append(world.log.read()[1])
    assert results[0]["absent"] == ["bob"]
    assert results[0]["weights"]["experts/0"] == results[1]["weights"]["experts/0"] - 5  # bob has five rows
