"""Collect finished runs into results/: one JSON file a run, and table.md.

usage: python experiments/tiny-fedweave/collect.py OUT
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
METHODS = ("fedweave", "fedit")


def summary(run: Path) -> dict[str, Any]:
    """Return what is worth keeping of a run folder: no paths, no single examples."""
    metrics = json.loads((run / "metrics.json").read_text())
    manifest = json.loads((run / "manifest.json").read_text())
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for result in metrics["routing"].values():
        result.pop("each", None)
    method, _, seed = run.name.partition("-")
    fitted = rounds[1:]
    return {
        "command": f"fedloom run experiments/tiny-fedweave/{method}.yaml --out OUT --set seed={seed}",
        **metrics,
        "curve": [{"round": r["round"], "train_loss": r.get("train_loss"), "evaluation": r.get("evaluation")}
                  for r in rounds],
        "seconds_probe": rounds[0].get("seconds", 0),
        "seconds_per_round": round(statistics.mean(r["seconds"] for r in fitted), 2),
        "bytes_up_per_client_and_round": round(statistics.mean(
            c["bytes_up"] for r in fitted for c in r["clients"].values())),
        "bytes_up_per_client_probe": round(statistics.mean(
            c["bytes_up"] for c in rounds[0]["clients"].values())) if "clients" in rounds[0] else 0,
        "versions": {"fedloom": manifest["fedloom"], "python": manifest["python"], **manifest["packages"]},
        "machine": manifest["machine"],
        "backbone": manifest["backbone"],
        "pools": manifest["data"]["pools"],
        "mix": manifest["data"]["mix"],
    }  # fmt: skip


def spread(values: list[float]) -> str:
    """Return mean ± sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the tables of losses, scores and alignment."""
    first = next(iter(results.values()))[0]
    tasks = list(first["routing"]["top1"]["loss"])
    lines = ["| | seeds | " + " | ".join(tasks) + " |", "|---|---|" + "---|" * len(tasks)]
    for quantity in ("loss", "score"):
        for method, runs in results.items():
            seeds = ", ".join(str(r["seed"]) for r in runs)
            for mode in runs[0]["routing"]:
                cells = [spread([r["routing"][mode][quantity][t] for r in runs]) for t in tasks]
                label = f"{method}, {mode}" if len(runs[0]["routing"]) > 1 else method
                lines.append(f"| {label}: {quantity} | {seeds} | " + " | ".join(cells) + " |")
            if quantity == "loss":
                for label, key in (("before round 1", "loss"), ("backbone alone", "loss_backbone")):
                    cells = [spread([r["before"][key][t] for r in runs]) for t in tasks]
                    lines.append(f"| {method}, {label}: loss | {seeds} | " + " | ".join(cells) + " |")
    for runs in results.values():
        if runs[0].get("alignment"):
            lines += ["", "| seed | M* | purity: buckets | experts | NMI: experts | ARI: experts | minutes |",
                      "|---|---|---|---|---|---|---|"]  # fmt: skip
            for r in runs:
                a = r["alignment"]
                lines.append(
                    f"| {r['seed']} | {r['experts']} | {a['local']['purity']:.4f} | {a['global']['purity']:.4f} | "
                    f"{a['global']['nmi']:.4f} | {a['global']['ari']:.4f} | {r['seconds'] / 60:.1f} |"
                )
            lines += ["", "| bucket purity by client | " + " | ".join(str(r["seed"]) for r in runs) + " |",
                      "|---|" + "---|" * len(runs)]  # fmt: skip
            for client in sorted({c for r in runs for c in r["alignment"]["clients"]}):
                cells = [r["alignment"]["clients"].get(client) for r in runs]
                shown = [f"{c['purity']:.3f} ({len(c['buckets'])})" if c else "no rows" for c in cells]
                lines.append(f"| {client} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main(out: Path) -> None:
    results: dict[str, list[dict[str, Any]]] = {}
    (HERE / "results").mkdir(exist_ok=True)
    for method in METHODS:
        for run in sorted(out.glob(f"{method}-*")):
            if (run / "metrics.json").is_file():
                found = summary(run)
                results.setdefault(method, []).append(found)
                text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
                (HERE / "results" / f"{run.name}.json").write_text(text)
    (HERE / "results" / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
