"""Records of runs that never were, small, with numbers that a test can work out."""

import json

import numpy as np

TASKS = ("gsm8k", "arc")


def nll(task, seed, n, level):
    """Return [[summed nll, tokens]] whose ratio is near ``level``: noise is the same for all methods of a seed."""
    rng = np.random.default_rng([seed, len(task)])
    tokens = rng.integers(3, 9, n)
    return [[float(t * (level + 0.2 * e)), int(t)] for t, e in zip(tokens, rng.normal(size=n))]


def run(
    label, seed=42, loss=1.0, n=40, alpha=0.3, modes=("top1",), score=0.5, title=None, tasks=TASKS, lower=None, **more
):
    """Return (record, examples) of one cell.

    ``score=None`` for a run without generation; ``lower``: mode → how far its loss lies below ``loss``, 0.01 more for
    each mode after the first where not given.
    """
    routing, examples = {}, {}
    for index, mode in enumerate(modes):
        below = (lower or {}).get(mode, 0.01 * index)
        each_loss = {task: nll(task, seed, n, loss - below) for task in tasks}
        losses = {task: sum(a for a, _ in rows) / sum(b for _, b in rows) for task, rows in each_loss.items()}
        routing[mode] = {"loss": losses | {"macro": sum(losses.values()) / len(tasks)}, "loss_seconds": 2.0 + index}
        examples[mode] = {"each_loss": each_loss}
        if score is not None:
            rng = np.random.default_rng(seed)
            each = {task: [float(u < score) for u in rng.random(n)] for task in tasks}
            scores = {task: sum(v) / n for task, v in each.items()}
            routing[mode]["score"] = scores | {"macro": sum(scores.values()) / len(tasks)}
            routing[mode]["generation_seconds"] = 8.0 * (1 + index)
            examples[mode]["each"] = each
    many = len(modes) > 1
    gates = {task: [0.7, 0.2, 0.1] if i % 2 else [0.1, 0.15, 0.75] for i, task in enumerate(tasks)}
    losses = {f"client-{i:02d}": {"loss": loss + 0.1 * i, "per_task": {}} for i in range(3)}
    record = {
        "cell": f"{label}_a{alpha}_s{seed}",
        "label": label,
        "title": title or label.replace("_", " ").title(),
        "method": label if label in ("fedit", "local", "centralised") else "fedweave" if "weave" in label else label,
        "seed": seed,
        "alpha": alpha,
        "mixing": None,
        "backbone": "tiny",
        "config_hash": "c" * 64,
        "source_hash": "s" * 64,
        "backbone_hash": "b" * 64,
        "fedloom": "0.1.0",
        "packages": {"torch": "2.9"},
        "machine": {"processor": "x86", "gpu": None, "threads": 1, "cpu_capability": "AVX2"},
        "global_model": True,
        "personal": False,
        "experts": 3 if many else 1,
        "routing": routing,
        "routing_matrix": {task: {"gate": row, "top1": row} for task, row in gates.items()} if many else {},
        "personalised": {
            "mean": loss + 0.1, "weighted_mean": loss + 0.05, "worst": loss + 0.2, "rows_per_kind": 10,
            "routing": "top1", "clients": losses,
        },
        "alignment": {
            k: {"purity": 0.9, "nmi": 0.8, "ari": 0.7} for k in ("local", "global", "prototypes")
        } if many else None,
        "before": {"loss": {}, "loss_backbone": dict.fromkeys([*tasks, "macro"], 2.5)},
        "curve": [[r, loss + 1 / (1 + r)] for r in (0, 5, 10, 20)],
        "costs": {
            "rounds": 20, "clients": 20, "bytes_up": 1024, "bytes_down": 2048, "probe_bytes_up": 512 * many,
            "probe_bytes_down": 256 * many, "steps": 4000, "probe_steps": 800 * many, "probe_seconds": 3.5 * many,
            "round_seconds": 2.0, "train_seconds": 40.0 + seed, "peak_bytes": 3 * 2**20,
        },
        "seconds": 100.0,
        "command": "fedloom bench suite.yaml --out out",
    }  # fmt: skip
    return record | more, examples


def write(out, runs, examples=True):
    (out / "examples").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record, _ in runs]
    (out / "results.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if examples:
        for record, each in runs:
            (out / "examples" / f"{record['cell']}.json").write_text(json.dumps(each), encoding="utf-8")
    return out


def suite():
    """A whole benchmark: baselines, ablations, a clusterer, two methods over three alphas, three seeds."""
    modes = ("top1", "top2", "soft")
    runs = []
    for seed in (42, 43, 44):
        drift = 0.02 * (seed - 43)
        runs += [
            run("fedweave", seed, 1.0 + drift, modes=modes, title="FedWeave", score=0.6),
            run("fedit", seed, 1.1 - drift, title="FedIT"),
            run("fedlease", seed, 1.05 + drift, modes=modes, title="FedLEASE", score=0.55),
            run("ffa_lora", seed, 1.3, title="FFA-LoRA", score=0.4),
            run("fedweave_wo_prototype_expert", seed, 1.04, modes=modes, title="w/o prototype-expert", score=0.55),
            run("fedweave_wo_client_router", seed, 1.0 + drift, modes=modes, title="w/o client-router", score=0.6),
            run("fedweave_spectral", seed, 1.01 + drift, modes=modes, title="FedWeave, spectral", score=0.61),
            run("local", seed, title="Local only", routing={}, routing_matrix={}, global_model=False, personal=True),
            run("centralised", seed, 0.8, title="Centralised", score=0.7),
        ]
        for alpha in (0.1, 0.5):
            runs.append(run("fedweave", seed, 1.0 + drift + alpha / 10, alpha=alpha, modes=modes, title="FedWeave"))
            runs.append(run("fedlease", seed, 1.1 + drift - alpha / 10, alpha=alpha, modes=modes, title="FedLEASE"))
    return runs
