"""Across real processes on loopback, over TLS with node keys: a SuperLink, nodes, Flower's own command line.

One SuperLink and its nodes serve all tests of this file, since every process takes seconds to start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from doomed_server_moments import MOMENTS
from flower_processes import (
    HOSTILE,
    LATE,
    PATIENCE,
    SITES,
    UNLISTED,
    Sites,
    log_of,
    result_of,
    rows_of,
    states_of,
    write_node,
)
from hostile_node import SENT

from fedloom.config import parse_config
from fedloom.experiment import run
from fedloom.methods import METHODS
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.loop import Receipt
from fedloom.types import Order
from small_world import Wire, World, client_rows, save_backbone

pytestmark = pytest.mark.timeout(3 * PATIENCE)

SECTIONS: dict[str, Any] = {
    "seed": 42,
    "adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.05},
    "federation": {"rounds": 2, "min_replies": 2},
    "training": {"steps": 3, "batch_size": 2, "lr": 0.01, "router_lr": 0.005},
    "evaluation": {"generate": False},
}
#: Seconds of a deadline that a dead site costs; a living one answers within a tenth of it on a quiet machine.
DEADLINE = 30.0


def waits(expected: int, deadline: float = PATIENCE, wait: float = PATIENCE) -> dict[str, Any]:
    return {"expected": expected, "wait": wait, "deadline": deadline}


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Native or not → backbone."""
    return {native: save_backbone(tmp_path_factory.mktemp("backbone"), native=native) for native in (False, True)}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, backbones: dict[bool, Path]) -> Iterator[Sites]:
    with Sites(tmp_path_factory.mktemp("sites")) as found:
        found.start_superlink()
        found.register(*SITES)
        yield found


def simulated_without(
    out: Path, method: dict[str, Any], missing: dict[int, str], names: Sequence[str], rounds: int
) -> dict[str, bytes]:
    """Return the last states of a simulation in which a client's reply is lost in some rounds."""

    def lose(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if receipt.client != missing.get(orders[0].round)]

    options = {key: value for key, value in method.items() if key != "name"}
    built = METHODS[method["name"]](METHODS[method["name"]].Options(**options))
    world = World(out, clients={name: client_rows()[name] for name in names})
    world.run(built, rounds=rounds, transport=Wire(world.simulator, lose))
    return states_of(out)


FEDWEAVE = {"name": "fedweave", "warmup_steps": 2}
#: ``test_deploy_page`` does it with FedIT; FedWeave without compression is killed and attacked below.
RUNS: dict[str, dict[str, Any]] = {
    "fedweave": {"method": FEDWEAVE, "federation": {**SECTIONS["federation"], "wire": "bf16"}},
    "fedweave-secret": {
        "method": FEDWEAVE,
        "secagg": {"min_contributors": 2, "threshold": 0.6, "reveal_signatures": True},
    },
    "fcmoe": {"method": {"name": "fcmoe"}, "adapter": {"native": "full"}},
}


@pytest.mark.parametrize("name", RUNS)
def test_processes_A5_give_bitwise_the_simulators_model(
    name: str, sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    """FedWeave's replies hold bfloat16 tensors (A5), or integers under masks."""
    backbone = backbones[METHODS[RUNS[name]["method"]["name"]].native]
    sections = {**SECTIONS, **RUNS[name], "backbone": {"name": str(backbone), "threads": 1}}
    sites.have(backbone)
    there = sites.configure(f"run-{name}", **sections, sites=waits(3))
    said = sites.run()
    assert "Done: " in said, said
    rows = {site: str(sites.home / site / "rows.jsonl") for site in SITES}
    run(parse_config({**sections, "data": {"clients": rows}}), tmp_path / "here")
    assert result_of(there) == result_of(tmp_path / "here")


def test_processes_A8_too_few_sites_end_the_run_with_both_numbers(sites: Sites, backbones: dict[bool, Path]) -> None:
    sites.have(backbones[False])
    federation = {"rounds": 2, "min_replies": 4}
    backbone = {"name": str(backbones[False])}
    out = sites.configure(
        "run-few", **{**SECTIONS, "federation": federation}, backbone=backbone, sites=waits(5, wait=20.0)
    )
    said = sites.run()
    assert "3 sites are there after 20 s (ann, bob, cyd); at least 4 are needed" in said
    assert not out.joinpath("rounds.jsonl").exists()


def test_only_a_listed_key_over_tls_gets_in(sites: Sites, tmp_path: Path) -> None:
    """Refused, and the log says so: a key that is not listed, a CA that did not sign the server, plain text."""
    activated = sites.log("superlink").count("Activated node_id")
    sites.start_bare_node(UNLISTED, write_node(tmp_path / UNLISTED, SITES[0], tmp_path))
    other = Sites(tmp_path / "other").keys / "ca.pem"
    key = str(sites.keys / SITES[0])
    assert "the server's certificate is refused: unable to get local issuer" in sites.refused(
        "--key", key, "--ca", str(other)
    )
    assert "speaks TLS, not plain text" in sites.refused("--insecure")
    sites.wait_for(lambda: "Failed to activate SuperNode" in sites.log(UNLISTED), "the unlisted node's refusal")
    assert "No SuperNode found with the given public key" in sites.log("superlink")
    assert "SuperNode ID" not in sites.log(UNLISTED)
    sites.kill(UNLISTED)
    assert sites.log("superlink").count("Activated node_id") == activated


#: Round → what the log says of what ``hostile_node`` sends in it.
SAID = {
    1: "holds NaN or infinity",
    2: "has shape",
    3: "tensors are unknown",
    4: "its norm",
    5: "cannot be decoded: SafetensorError",
    6: "truncated or not in safetensors format",  # a pickle
    7: "for round 6, but 'dan' was asked for round 7",
}


def test_processes_A4_a_hostile_site_changes_nothing_for_the_others(
    sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    """Its node has a listed key; what it sends is wrong in another way each round, and right at last."""
    assert SENT.keys() == SAID.keys()
    sites.have(backbones[False])
    program = [str(Path(__file__).parent / "hostile_node.py")]
    sites.register(HOSTILE)
    sites.start_node(HOSTILE, write_node(sites.home / HOSTILE, HOSTILE, backbones[False]), program=program)
    rounds = len(SAID) + 1
    sections = {**SECTIONS, "federation": {"rounds": rounds, "min_replies": 2}}
    out = sites.configure(
        "run-hostile", **sections, method=FEDWEAVE, backbone={"name": str(backbones[False])}, sites=waits(4)
    )
    said = sites.run()
    sites.kill(HOSTILE)
    assert "Done: " in said, said
    quarantined = [record["quarantined"] for record in log_of(out)]
    assert [list(found) for found in quarantined] == [[], *[[HOSTILE]] * len(SAID), []]
    for round, reason in SAID.items():
        assert reason in quarantined[round][HOSTILE]
    assert said.count("the reply of dan is quarantined: ") == len(SAID)
    missing = dict.fromkeys(SAID, HOSTILE)
    assert states_of(out) == simulated_without(tmp_path, FEDWEAVE, missing, [*SITES, HOSTILE], rounds)


def test_processes_a_site_that_comes_late_trains_with_those_like_it(
    sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    """Its rows are ann's, so it gets her experts; which round it comes in depends on the clock."""
    sites.have(backbones[False])
    sites.register(LATE)
    sections = {**SECTIONS, "federation": {"rounds": 8, "min_replies": 2}}
    out = sites.configure(
        "run-late", **sections, method=FEDWEAVE, backbone={"name": str(backbones[False])}, sites=waits(3)
    )
    run = sites.submit()
    sites.wait_for((out / "sites.json").is_file, "the list of the first start")
    sites.start_node(LATE, write_node(sites.home / LATE, LATE, backbones[False]))
    said = sites.finish(run)
    sites.kill(LATE)
    records = log_of(out)
    ((round, joined),) = [(r["round"], r["joined"]) for r in records if r.get("joined")]
    assert f"fay joins after round {round}, with experts" in said, said
    state = CheckpointFolder(out / "checkpoints", {}).state(8)
    assert joined["fay"]["experts"] == state.values["assignment"]["ann"]
    assert [LATE in record.get("cohort", ()) for record in records] == [n > round for n in range(9)]

    world = World(tmp_path, clients={name: rows_of(name) for name in [*SITES, LATE]})
    world.setup = replace(world.setup, clients=SITES)
    asked = iter(range(9))
    newcomers = lambda known: [LATE] if next(asked) >= round and LATE not in known else []  # noqa: E731
    world.run(METHODS["fedweave"](METHODS["fedweave"].Options(warmup_steps=2)), rounds=8, newcomers=newcomers)
    assert states_of(out) == states_of(tmp_path)


def test_processes_a_server_killed_at_eleven_moments_ends_with_the_simulators_model(
    sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    """SIGKILL each time, and ``flwr run`` again."""
    sections = {**SECTIONS, "method": FEDWEAVE, "federation": {"rounds": 3, "min_replies": 2}}
    sections["backbone"] = {"name": str(backbones[False]), "threads": 1}
    sites.have(backbones[False])
    out = sites.configure("run-doomed", **sections, sites=waits(3))
    deaths = sites.folder / "deaths"
    with sites.server_program("import doomed_server\n\napp = doomed_server.app\n"):
        for moment in MOMENTS:
            sites.submit()
            sites.wait_for(lambda moment=moment: deaths.is_file() and moment in deaths.read_text(), moment)
            sites.wait_for(lambda: not sites.server_apps(), f"the end of the ServerApp {moment}")
            assert not (out / "metrics.json").exists()
        said = sites.run()
    assert "Done: " in said, said
    assert deaths.read_text().splitlines() == list(MOMENTS)
    rows = {site: str(sites.home / site / "rows.jsonl") for site in SITES}
    run(parse_config({**sections, "data": {"clients": rows}}), tmp_path / "here")
    assert result_of(out) == result_of(tmp_path / "here")


def test_processes_A6_A7_killed_sites_and_servers_cost_what_is_said(
    sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    """bob dies in round 1 and in round 4, the ServerApp after round 2, the SuperLink after round 3. (kill −9)"""
    sites.have(backbones[False])
    sections = {**SECTIONS, "federation": {"rounds": 4, "min_replies": 2}}
    out = sites.configure(
        "run-killed",
        **sections,
        method=FEDWEAVE,
        backbone={"name": str(backbones[False])},
        sites=waits(3, DEADLINE),
    )

    def after(round: int) -> None:
        checkpoint = out / "checkpoints" / f"round-{round:06d}"
        sites.wait_for(checkpoint.is_dir, f"round {round}")

    def kill_bob_at_work() -> None:
        sites.wait_for(lambda: sites.working("bob"), "bob at work", every=0.02)
        sites.kill("bob")

    sites.submit()
    after(0)
    kill_bob_at_work()
    after(2)
    sites.server_apps()[0].kill()

    sites.have(backbones[False])
    sites.submit()
    after(3)
    sites.kill("superlink")
    sites.start_superlink()
    last = sites.submit()
    sites.wait_for(lambda: "train.order" in sites.log("bob").partition(last)[2], "bob's last order", every=0.02)
    kill_bob_at_work()
    said = sites.finish(last)
    assert "Done: " in said, said
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [record["absent"] for record in records] == [[], ["bob"], ["bob"], [], ["bob"]]
    assert DEADLINE <= records[1]["seconds"] < DEADLINE + 10
    assert records[2]["seconds"] < DEADLINE  # A7: nobody waits for the dead
    assert DEADLINE <= records[4]["seconds"] < DEADLINE + 10
    missing = {1: "bob", 2: "bob", 4: "bob"}
    assert states_of(out) == simulated_without(tmp_path, FEDWEAVE, missing, SITES, 4)
