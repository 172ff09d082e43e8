"""Collect finished runs into results/: one JSON file a run, and table.md of all that are there.

usage: python experiments/synthetic-conflict/collect.py OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def summary(run: Path) -> dict[str, Any]:
    """Return what is worth keeping of a run folder: no paths, no single examples."""
    metrics = json.loads((run / "metrics.json").read_text())
    manifest = json.loads((run / "manifest.json").read_text())
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for result in metrics["routing"].values():
        for key in ("each", "each_loss"):
            result.pop(key, None)
    used = {key: manifest["data"][key] for key in ("dials", "rules", "mix")}
    versions = {"fedloom": manifest["fedloom"], "python": manifest["python"], **manifest["packages"]}
    curve = [
        {"round": r["round"], "train_loss": r.get("train_loss"), "evaluation": r.get("evaluation")} for r in rounds
    ]
    return {**metrics, "curve": curve, "data": used, "versions": versions, "source": manifest["source_hash"]}


def line(name: str, found: dict[str, Any]) -> str:
    cells = [name, str(found["seed"]), f"{found['data']['dials']['mixing']:g}", str(found["experts"])]
    alignment = found.get("alignment")
    cells.append(f"{alignment['global']['purity']:.3f}" if alignment else "")
    for quantity in ("loss", "score"):
        for mode in ("top1", "soft"):
            result = found["routing"].get(mode, {}).get(quantity)
            cells.append(f"{result['macro']:.3f}" if result else "")
    return "| " + " | ".join(cells) + " |"


def main(out: Path) -> None:
    lines = [
        "| run | seed | mixing | experts | purity | loss, top-1 | loss, soft | exact, top-1 | exact, soft |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(path.parent for path in out.glob("*/metrics.json")):
        text = json.dumps(summary(run), indent=1, ensure_ascii=False)
        (HERE / "results" / f"{run.name}.json").write_text(text + "\n")
    lines += [line(path.stem, json.loads(path.read_text())) for path in sorted((HERE / "results").glob("*.json"))]
    (HERE / "results" / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
