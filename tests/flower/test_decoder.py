"""Whatever bytes arrive, at a site or the server: a named refusal, no crash, no memory for what is only promised.

``tests/runtime/test_wire.py`` does the same for the payload of a reply by itself.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import terms_of, write_sites
from flwr.app import ConfigRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.errors import SiteRefusal, UpdateRejected
from fedloom.methods import METHODS
from fedloom.runtime.flower_messages import MAX_ABOUT, pack, unpack
from fedloom.runtime.loop import make_orders
from fedloom.runtime.site import Site, Terms, load_site
from fedloom.runtime.wire import decode, encode, encode_order
from fedloom.types import Plain
from small_world import TRAINING, world_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
VALUES = st.binary(max_size=20) | st.text(max_size=20) | st.integers(-(2**60), 2**60) | st.floats() | st.booleans()
FAST = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def unpacks_or_is_rejected(content: RecordDict, limit: int = 1 << 20) -> None:
    try:
        about, payload = unpack(content, limit)
    except UpdateRejected:
        return
    assert isinstance(about, dict)
    assert len(payload) == about["bytes"] <= limit


@FAST
@given(
    st.dictionaries(
        st.sampled_from(["about", "chunk-0", "chunk-1", "chunk--1", "x"]),
        st.dictionaries(st.sampled_from(["json", "data", "index", "y"]), VALUES, max_size=3),
        max_size=4,
    )
)
def test_records_of_any_content_are_rejected_or_whole(records: dict[str, dict[str, Any]]) -> None:
    unpacks_or_is_rejected(RecordDict({name: ConfigRecord(values) for name, values in records.items()}))


@FAST
@given(JSON, st.binary(max_size=30))
def test_headers_of_any_json_are_rejected_or_whole(about: Plain, data: bytes) -> None:
    for text in (json.dumps(about), json.dumps(about)[:-1], "[" * 5000, "9" * 5000):
        records = {"about": ConfigRecord({"json": text}), "chunk-0": ConfigRecord({"index": 0, "data": data})}
        unpacks_or_is_rejected(RecordDict(records))
    if isinstance(about, dict):
        content = pack({}, data)
        head = json.loads(content["about"]["json"])
        content["about"] = ConfigRecord({"json": json.dumps({**head, **about})})
        unpacks_or_is_rejected(content)


def test_a_header_beyond_the_limit_is_not_parsed() -> None:
    with pytest.raises(UpdateRejected, match="has not the form of one"):
        unpack(pack({"hello": "x" * MAX_ABOUT}), 1 << 30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Path) -> Site:
    node = write_sites(tmp_path_factory.mktemp("sites"), backbone_folder, limits={"max_steps": 3})[0]
    return Site(load_site(node.config))


@pytest.fixture(scope="module")
def terms(backbone_folder: Path) -> Terms:
    return terms_of("fedweave", backbone_folder)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The order that ann gets in round 1 of FedIT."""
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path_factory.mktemp("run"))
    return encode_order(make_orders(method, "fit", method.init(world.setup), ["ann"], TRAINING)[0])


@pytest.fixture
def no_blow_up() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def reads_or_refuses(site: Site, data: bytes) -> None:
    try:
        order = site._read(data)
    except (SiteRefusal, UpdateRejected):
        return
    assert order.client == "ann"
    assert order.training.steps <= 3
    assert order.spec.experts * order.spec.rank <= site.config.limits.max_width


def test_the_order_itself_is_carried_out(site: Site, terms: Terms, order: bytes) -> None:
    reply, _ = site.answer(order, terms.model_copy(update={"method": "fedit"}))
    assert decode(reply)[1]["counts"]["examples"] == 8


@settings(FAST, max_examples=400)
@given(st.data())
def test_mutated_orders_are_refused_or_read(site: Site, order: bytes, data: st.DataObject) -> None:
    mutated = bytearray(order)
    places = st.integers(0, min(len(order), 2500) - 1)  # the header, mostly
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        mutated[place] = value
    cut = data.draw(st.integers(0, len(order)))
    for payload in (bytes(mutated), bytes(mutated[:cut]), bytes(mutated[cut:])):
        reads_or_refuses(site, payload)


@settings(FAST, max_examples=300)
@given(st.data())
def test_orders_with_any_json_are_refused_or_read(site: Site, order: bytes, data: st.DataObject) -> None:
    tensors, header = decode(order)
    part = data.draw(st.sampled_from(["", "spec", "training"]))
    changed = header[part] if part else header
    changed[data.draw(st.sampled_from(sorted(changed)))] = data.draw(JSON)
    reads_or_refuses(site, encode(tensors, header))


@pytest.mark.usefixtures("no_blow_up")
@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ("spec", {"rank": 10**9}, r"1000000000 wide; this site's limit \(max_width\) is 4096"),
        ("spec", {"experts": 10**9}, "2000000000 wide"),
        ("spec", {"router_hidden": 10**9}, "1000000000 wide"),
        ("spec", {"routers": 10**5, "router_hidden": 10**4}, "1000000000 wide"),
        ("spec", {"slots": [0] * 5000}, "5000 wide"),
        ("spec", {"rank": "2"}, "wrong type: rank"),
        ("spec", {"rank": True}, "wrong type: rank"),
        ("spec", {"rank": 0, "experts": -1}, "too small: experts, rank"),
        ("spec", {"colour": 1}, "cannot be understood: TypeError"),
        ("training", {"batch_size": 10**12}, "1000000000000 wide"),
        ("training", {"steps": 10**9}, "asks for 1000000000 steps; this site's limit is 3"),
        ("training", {"steps": -1}, "too small: steps"),
        ("training", {"optimizer_state": 5}, "wrong type: optimizer_state"),
        ("", {"client": "bob"}, "the order is for 'bob'; this site is 'ann'"),
        ("", {"kind": "exec"}, "kind 'exec'"),
        ("", {"round": "../../x"}, "round '../../x'"),
        ("", {"values": []}, "values are not an object"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_order_for_too_much_is_refused(
    part: str, changes: dict[str, Plain], says: str, site: Site, order: bytes
) -> None:
    tensors, header = decode(order)
    (header[part] if part else header).update(changes)
    with pytest.raises(SiteRefusal, match=says):
        site._read(encode(tensors, header))
