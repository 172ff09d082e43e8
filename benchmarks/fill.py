"""Write the results of ``results/*.json`` into README.md."""

from __future__ import annotations

import json
from pathlib import Path

from common import Comparison, table

START, END = "<!-- results: python benchmarks/fill.py -->", "<!-- end -->"


def main() -> None:
    here = Path(__file__).parent
    parts = []
    for path in sorted((here / "results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        facts = record["machine"]
        kept = Comparison.__dataclass_fields__
        found = [Comparison(**{k: v for k, v in result.items() if k in kept}) for result in record["results"]]
        packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
        parts.append(
            f"### {record['benchmark']}\n\n{table(found)}\n\n{facts['cpu']}, {facts['cores']} cores, "
            f"{facts['threads']} threads, {facts['cpu_capability']}; {packages}; {facts['clock']} time; load average "
            f"{facts['load_average']} at the start; {facts['date'][:10]}: `{facts['command']}`\n"
        )
    readme = here / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    readme.write_text(before + START + "\n" + "\n".join(parts) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
