"""What tables say of times, memory and parameters: as measured, as the suite asked, and where a record does not say."""

import csv
import io

import pytest
from bench_records import run, write

from fedloom.bench.analysis_tables import discovery_table
from fedloom.bench.costs import budget_table, cost_table
from fedloom.bench.record import costs
from fedloom.bench.results import load_results
from fedloom.bench.significance import Comparisons

LAYERS, WIDTH = 30, 576  # SmolLM2-135M; q_proj is square
Q_LORA = LAYERS * 4 * (WIDTH + WIDTH)  # of rank 4


def entry(**more):
    return {"steps": 10, "bytes_up": 1, "bytes_down": 1} | more


def test_costs_come_from_the_log():
    """Clustering: mean of 0.2 and 0.4 s, of the clients that tell; the server: 1 + 2 + 3 s."""
    clients = {"a": entry(cluster_seconds=0.2), "b": entry(cluster_seconds=0.4), "c": entry()}
    rounds = [{"round": 0, "seconds": 9.0, "server_seconds": 1.0, "clients": clients}]
    rounds += [{"round": r, "seconds": 5.0, "server_seconds": 1.0 + r, "clients": {"a": entry()}} for r in (1, 2)]
    found = costs(rounds, {"peak_bytes": 3, "peak_device_bytes": 4})
    assert found["cluster_seconds"] == pytest.approx(0.3)
    assert (found["probe_server_seconds"], found["server_seconds"]) == (1.0, 6.0)
    assert (found["probe_seconds"], found["train_seconds"]) == (9.0, 19.0)
    assert (found["peak_bytes"], found["peak_device_bytes"]) == (3, 4)


def test_what_a_log_does_not_hold_is_not_zero():
    rounds = [{"round": 0, "seconds": 9.0, "clients": {"a": entry()}}]  # an older version's, resumed by this one
    rounds += [{"round": 1, "seconds": 5.0, "server_seconds": 2.0, "clients": {"a": entry()}}]
    found = costs(rounds, {"peak_bytes": 3})
    keys = ("cluster_seconds", "probe_server_seconds", "server_seconds", "peak_device_bytes")
    assert [found[key] for key in keys] == [None] * 4
    no_probe = [{"round": 0}, {"round": 1, "seconds": 5.0, "server_seconds": 2.0, "clients": {"a": entry()}}]
    assert costs(no_probe, {"peak_bytes": 3})["server_seconds"] == 2.0


def measured(label, seed, **more):
    """Return a run whose costs hold ``more``."""
    found, examples = run(label, seed, modes=("top1", "soft") if label == "fedweave" else ("top1",))
    found["costs"] |= more
    return found, examples


def row(table, method):
    return next(r for r in csv.DictReader(io.StringIO(table.csv())) if r["method"] == method)


def test_the_servers_time_and_an_accelerators_memory_have_columns_where_they_were_measured(tmp_path):
    runs = [measured("fedit", 42, server_seconds=7.0, peak_device_bytes=5 * 2**20), measured("fedit", 43)]
    table = cost_table(load_results(write(tmp_path, runs)))
    found = row(table, "Fedit")
    assert (found["time: server"], found["time: server n"]) == ("7.0", "1")
    assert found["peak memory on the accelerator"] == str(5.0 * 2**20)
    notes = " ".join(table.notes)
    assert "aligning buckets, merging. It is not in the times before it. 1 older run did not measure it." in notes
    assert "beside it: the most that its tensors took" in notes


def test_older_results_have_no_such_columns_and_say_so(tmp_path):
    table = cost_table(load_results(write(tmp_path, [measured("fedit", 42)])))
    assert not [c.name for c in table.columns if "server" in c.name or "accelerator" in c.name]
    assert any(note.startswith("What the server does") and "not measured apart" in note for note in table.notes)


def test_discovery_tells_clustering_and_alignment_from_the_rest_of_the_probe(tmp_path):
    runs = [measured("fedweave", 42, cluster_seconds=0.25, probe_server_seconds=3.0), measured("fedweave", 43)]
    results = load_results(write(tmp_path, runs))
    table = discovery_table(results, Comparisons(results))
    found = row(table, "Fedweave")
    assert (found["probe, s"], found["clustering, s"], found["alignment, s"]) == ("3.5", "0.25", "3.0")
    assert (found["clustering, s n"], found["alignment, s n"]) == ("1", "1")
    assert sum("Known of 1 of 2 runs." in note for note in table.notes) == 2


def test_older_discoveries_do_not_claim_that_the_probe_holds_the_alignment(tmp_path):
    results = load_results(write(tmp_path, [measured("fedweave", 42)]))
    table = discovery_table(results, Comparisons(results))
    assert not {"clustering, s", "alignment, s"} & {column.name for column in table.columns}
    said = "is not in it. Nor is the server's alignment, which these runs did not measure. These runs did not measure"
    assert sum(said in note for note in table.notes) == 1


def asked(label, seed=42, title=None, targets=("q_proj",), rank=4, **options):
    """Return a run on SmolLM2 whose record holds its configuration."""
    found, examples = run(label, seed, title=title, experts=3)
    method = {"name": found["method"], **options}
    adapter = {"rank": rank, "targets": list(targets) if targets else None, "native": None}
    return found | {"backbone": "smollm2-135m", "config": {"method": method, "adapter": adapter}}, examples


def smollm2(table):
    return [r for r in csv.DictReader(io.StringIO(table.csv())) if r["backbone"] == "smollm2-135m"]


def test_budgets_are_of_the_suites_rank_targets_and_options(tmp_path):
    table = budget_table(load_results(write(tmp_path, [asked("fedweave", router_hidden=16, title="FedWeave")])))
    (found,) = smollm2(table)
    assert (found["rank"], found["LoRA"]) == ("4", str(3 * Q_LORA))
    assert found["routers and other"] == str(16 * WIDTH + 16 + 3 * 16 + 3)
    assert not any("defaults, not this suite's" in note for note in table.notes)
    assert any(note.startswith("On backbones without runs here") for note in table.notes)


def test_labels_of_one_method_have_rows_of_their_own_where_they_differ(tmp_path):
    runs = [
        asked("fedweave", title="FedWeave", router_hidden=16),
        asked("fedweave_spectral", title="FedWeave, spectral", router_hidden=16, clusterer="spectral"),
        asked("fedweave_wide", title="FedWeave, wide", router_hidden=32),
        asked("fedit", title="FedIT"),
    ]
    found = {r["method"]: r["routers and other"] for r in smollm2(budget_table(load_results(write(tmp_path, runs))))}
    narrow, wide = (h * WIDTH + h + 3 * h + 3 for h in (16, 32))
    assert found == {"FedWeave and FedWeave, spectral": str(narrow), "FedWeave, wide": str(wide), "FedIT": "0"}


def test_records_that_do_not_say_are_counted_by_defaults_and_a_note_says_so(tmp_path):
    old, examples = run("fedit", 43, rank=4)
    runs = [asked("fedit", targets=None), (old | {"backbone": "smollm2-135m"}, examples)]
    table = budget_table(load_results(write(tmp_path, runs)))
    (found,) = smollm2(table)  # q_proj and v_proj (3 of 9 heads) by default, as the other record says
    assert (found["rank"], found["LoRA"]) == ("4", str(LAYERS * 4 * (WIDTH + WIDTH + WIDTH + WIDTH // 3)))
    assert any("options in 1 of 2 runs: defaults, not this suite's" in note for note in table.notes)


def test_options_of_another_version_are_named_and_not_counted(tmp_path):
    table = budget_table(load_results(write(tmp_path, [asked("fedit", gone=1)])))
    assert not smollm2(table)
    assert any(note.startswith("Not counted: fedit on smollm2-135m") and "method.gone" in note for note in table.notes)


def native(label, **method):
    found, examples = run(label, 42, method=label, title=label, backbone="tiny-switch")
    adapter = {"rank": 32, "targets": None, "native": "full"}
    return found | ({"config": {"method": {"name": label, **method}, "adapter": adapter}} if method else {}), examples


@pytest.mark.parametrize(("options", "share"), [({}, 0.5), ({"capacity": 0.25}, 0.25)])
def test_fedmoes_clients_hold_a_part_of_the_experts(tmp_path, options, share):
    table = budget_table(load_results(write(tmp_path, [native("fedmoe", **options), native("fedavg_moe")])))
    key = "per client and round: "
    by_method = {r["method"]: r for r in csv.DictReader(io.StringIO(table.csv()))}
    theirs, ours = by_method["FedAvg"], by_method["FedMoE"]
    experts, whole = int(theirs["LoRA"]), int(theirs["total"])
    assert [int(theirs[key + way]) for way in ("trained", "up", "down")] == [whole] * 3
    assert [int(ours[key + way]) for way in ("trained", "up", "down")] == [whole - experts + share * experts] * 3
    assert any(note.startswith("A client of FedMoE gets, trains and sends a part") for note in table.notes)
