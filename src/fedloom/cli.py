"""The command line. Exit code 0: done; 1: something the user can mend, said without a traceback; 2: wrong usage."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.flower_cli import flower_commands
from fedloom.version import __version__

app = typer.Typer(
    name="fedloom",
    help="Federated fine-tuning of language models whose capacity is a mixture of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Routing = Annotated[str | None, typer.Option(help="top1, top2, …, soft or off; default: the model's own.")]
BackboneName = Annotated[
    str | None, typer.Option(help="Backbone name or folder, where it is not found under the recorded name.")
]


def harmless(text: str) -> Text:
    """Return words from outside as they stand: no markup, no emoji codes, nothing that turns or breaks lines unseen."""
    return Text("".join(c if _is_plain(c) else repr(c)[1:-1] for c in text))


def _is_plain(c: str) -> bool:
    """Return whether a terminal shows a character as it is; wide and hard spaces, and joiners, are parts of scripts."""
    return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) == "Zs"


def tell(text: str) -> None:
    """Print words from outside, not folded at the console's width: a fold would break paths, commands and answers."""
    console.file.write(harmless(text).plain + "\n")  # not ``print``, which makes spaces of tabs


def spoken(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a mistake of the user into one message and exit code 1."""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FedloomError as error:
            errors.print("Error:", style="bold red", end=" ")
            errors.print(harmless(str(error)), soft_wrap=True)
            raise typer.Exit(1) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            errors.print(harmless(f"Error: {where}{error.strerror or error}"), soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            errors.print("\nStopped. A run that has finished a round goes on from there with --resume.")
            raise typer.Exit(1) from None

    return wrapper


app.add_typer(flower_commands(spoken), name="flower")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
@spoken
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the run.")] = Path("quickstart"),
    backbone: Annotated[str, typer.Option(help="Backbone: smollm2-135m, or tiny for a look in a minute.")] = (
        "smollm2-135m"
    ),
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run in --out.")] = False,
    quiet: Quiet = False,
) -> None:
    """FedWeave on real text with a real pretrained model, on a CPU, in minutes."""
    from fedloom.quickstart import quickstart_config

    _run(quickstart_config(backbone), out, resume, quiet)


@app.command("run")
@spoken
def run_command(
    config: Annotated[Path, typer.Argument(help="YAML configuration.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value: section.key=value. May be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a method from a configuration: model, metrics, report and checkpoints."""
    from fedloom.config import load_config

    _run(load_config(config, overrides or []), out, resume, quiet)


def _run(config: Any, out: Path, resume: bool, quiet: bool) -> None:
    from fedloom.experiment import run
    from fedloom.quickstart import explain, results
    from fedloom.terminal import TerminalObserver

    with TerminalObserver(console, quiet).shown() as observer:
        metrics = run(config, out, resume=resume, observer=observer)
    (results if quiet else explain)(console, out, metrics)


@app.command()
@spoken
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model folder.", show_default=False)],
    task: Annotated[list[str], typer.Option("--task", help="NAME=FILE.jsonl; may be repeated.", show_default=False)],
    routing: Routing = None,
    backbone: BackboneName = None,
    loss_only: Annotated[bool, typer.Option(help="Skip generation.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure loss and score of a trained model on files of rows.

    A known task's NAME (gsm8k, …) chooses its metric. Any other NAME is scored by exact match, up to case and white
    space, of at most 64 generated tokens with a row's response, or any of its references.
    """
    from fedloom.evaluation.scores import scoring
    from fedloom.model import evaluate_files
    from fedloom.report.folder import is_routed
    from fedloom.terminal import TerminalObserver

    files: dict[str, Path] = {}
    for name, path in map(_named_file, task):
        if name in files:
            raise ConfigError(f"--task names {name!r} twice. Give each file a name of its own.")
        files[name] = path
    with TerminalObserver(console, quiet or as_json).shown() as observer:
        result = evaluate_files(
            model, files, routing=routing, backbone=backbone, generate=not loss_only, observer=observer
        )
    if as_json:
        _print_json(result)
        return
    routed = is_routed(model) or result["routing"] == "off"
    counted = harmless(scoring(files)) if result["score"] else None
    table = Table(title=harmless(f"{model} · {result['routing']}" if routed else str(model)), caption=counted)
    for heading in ("task", "examples", "loss", "score"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for name in [*files, "macro"]:
        score = result["score"].get(name)
        table.add_row(
            harmless(name),
            str(result["examples"].get(name, "")),
            _number(result["loss"][name]),
            _number(score),
        )
    console.print(table)


def _named_file(item: str) -> tuple[str, Path]:
    name, equals, path = item.partition("=")
    if not equals or not name or not path:
        raise ConfigError(f"--task {item!r} is not of the form NAME=FILE.jsonl.")
    return name, Path(path)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


@app.command()
@spoken
def generate(
    model: Annotated[Path, typer.Argument(help="Model folder.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="What to ask.", show_default=False)],
    routing: Routing = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of the answer.")] = 128,
    explain: Annotated[bool, typer.Option("--explain", help="Print the gate of each expert, too.")] = False,
    backbone: BackboneName = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt with a trained model."""
    from fedloom.model import load_model
    from fedloom.terminal import TerminalObserver

    loaded = load_model(model, backbone=backbone)
    gates = loaded.gates([prompt])[0].tolist() if explain or (as_json and loaded.has_gates) else []
    said = TerminalObserver(errors, quiet).say
    answer = loaded.generate(prompt, routing=routing, max_new_tokens=max_new_tokens, say=said)
    if as_json:
        _print_json({"prompt": prompt, "text": answer, "routing": routing or loaded.routing, "gates": gates})
        return
    tell(str(answer))
    if explain:
        table = Table(title=harmless(f"gates ({routing or loaded.routing})"))
        table.add_column("expert", justify="right")
        table.add_column("gate", justify="right")
        table.add_column("")
        table.add_column("learnt from")
        for m, gate in enumerate(gates):
            known = loaded.about["experts"][m]
            source = f"{len(known.get('buckets', {}))} clients, {known.get('examples', 0)} examples" if known else ""
            table.add_row(str(m), f"{gate:.3f}", "█" * round(20 * gate), source)
        console.print(table)


@app.command()
@spoken
def bench(
    suite: Annotated[Path, typer.Argument(help="YAML suite.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for results, tables and figures.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on with the cells that --out lacks.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Cells at the same time.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Run only cells whose name starts so; may repeat.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Build all on the meta device; say time, memory and bytes.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over settings and seeds: tables, figures, one report."""
    from fedloom.bench.command import bench_command

    only = only or []
    to = {"console": console, "errors": errors}
    if not bench_command(suite, out, **to, resume=resume, jobs=jobs, only=only, dry_run=dry_run, quiet=quiet):
        raise typer.Exit(1)


@app.command()
@spoken
def methods(as_json: AsJson = False) -> None:
    """List the methods: paper, what is aggregated, what stays local, exactness."""
    from fedloom.methods import METHODS

    rows: dict[str, dict[str, Any]] = {
        name: {
            "title": kind.title,
            "paper": kind.paper,
            "aggregated": kind.aggregated,
            "local": kind.local_only,
            "exact": kind.exact,
            "rank": kind.default_rank,
            "options": kind.Options().model_dump(),
        }
        for name, kind in METHODS.items()
    }
    if as_json:
        _print_json(rows)
        return
    wide = console.width >= 120
    table = Table("name", "method", "arXiv", *(("aggregated", "stays local", "exact average") if wide else ()))
    table.columns[0].no_wrap = True
    for name, row in rows.items():
        more = (row["aggregated"], row["local"], row["exact"]) if wide else ()
        table.add_row(name, row["title"], row["paper"].removeprefix("arXiv "), *more)
    console.print(table)
    if not wide:
        console.print("What is aggregated, what stays local, exactness: 120 columns or more, or --json.")


@app.command()
@spoken
def budget(
    backbone: Annotated[
        str, typer.Option(help="llama-3.2-3b, gemma-2-2b, switch-base-16, smollm2-135m, tiny, a folder.")
    ],
    method: Annotated[str, typer.Option(help="A method's name.")] = "fedweave",
    experts: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Number of LoRA experts; default: 4.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Rank per expert; default: the method's own.")
    ] = None,
    native: Annotated[
        str | None, typer.Option(help="Train a backbone's own experts by 'full' (default) or by 'lora' on each.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters and bytes from the architecture alone; nothing is downloaded."""
    from fedloom.budget import budget as count
    from fedloom.budget import check_asked

    check_asked(method, experts, rank, native)
    found = count(backbone, method, experts or 4, rank, native=native or "full")
    if as_json:
        _print_json(found.to_plain())
        return
    whole = found.rank == 0  # the whole backbone is trained, so nothing of it is frozen
    each = "experts in each mixture layer, trained whole" if whole else f"× rank {found.rank}"
    table = Table(title=harmless(f"{method} on {backbone}: {found.experts} {each}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("expert parameters, kept by the server", found.lora),
        (f"{'all other' if whole else 'router'} parameters, kept by the server", found.router),
        ("in all", found.total),
        ("trained by a client in a round", found.trained),
        ("bytes up per client and round (float32)", 4 * found.up),
        ("bytes down per client and round (float32)", 4 * found.down),
        ("signature values per bucket", found.signature),
        ("signature bytes per bucket", 4 * found.signature),
        ("probe: bytes up per bucket (signature and the other factor)", 4 * found.probe),
        ("frozen backbone parameters", 0 if whole else found.backbone_parameters),
    ):
        table.add_row(label, f"{value:,}")
    console.print(table)


@app.command()
@spoken
def status(
    out: Annotated[Path, typer.Argument(help="Folder of a run, going on or finished.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Say where a run stands: rounds, sites, experts and who trains them."""
    from fedloom.report.status import expert_lines, read_status
    from fedloom.report.wording import privacy_words, size

    found = read_status(out)
    if as_json:
        _print_json(found.to_plain())
        return
    done = "no round is finished" if found.round is None else f"round {found.round} of {found.rounds_wanted}"
    state = "finished" if found.finished else f"last written {found.updated or 'never'}"
    tell(f"{found.method} · {done} · {state}")
    if words := privacy_words(found.rounds, noise=True):
        tell(words)
    if found.waiting_for:
        tell(f"waiting for {', '.join(found.waiting_for)}")
    table = Table(box=None, pad_edge=False)
    for heading in ("site", "last seen", "examples", "used", "absent", "quarantined", "up", "down"):
        table.add_column(heading, justify="left" if heading in ("site", "last seen") else "right", overflow="fold")
    for name, site in found.sites.items():
        seen = "–" if site.last_round is None else f"round {site.last_round}"
        numbers = (site.examples, site.rounds, len(site.absent), len(site.quarantined))
        sizes = (size(site.bytes_up), size(site.bytes_down))
        table.add_row(harmless(name), site.last_seen_words() or seen, *map(str, numbers), *sizes)
    console.print(table)
    for name, site in found.sites.items():
        for number, reason in site.quarantined.items():
            tell(f"{name}, round {number}, quarantined: {reason}")
    for node, why in found.refused.items():
        tell(f"node {node} is refused: {why}")
    for line in expert_lines(found):
        tell(line)


@app.command()
@spoken
def check(
    files: Annotated[list[Path], typer.Argument(help="Files of rows.", show_default=False)],
    backbone: Annotated[str | None, typer.Option(help="Count tokens with this backbone's tokenizer.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="The most tokens of an example.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Look through data before a run; only counts are printed."""
    from fedloom.backbones.load import load_tokenizer
    from fedloom.data.preflight import check_file

    tokenizer = load_tokenizer(backbone) if backbone else None
    reports = [check_file(path, tokenizer, max_length) for path in files]
    if as_json:
        _print_json([report.to_plain() for report in reports])
    else:
        for report in reports:
            tell(str(report))
    if useless := [report.file for report in reports if not report.usable]:
        raise DataError(f"no row of {', '.join(useless)} is usable: there is nothing to train on.")


def _print_json(value: Any) -> None:
    """Print JSON as it can be read; what a terminal would obey is escaped, which changes no value."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    odd = {c: json.dumps(c)[1:-1].replace("\x7f", r"\u007f") for c in set(text) if not _is_plain(c)}
    sys.stdout.write("".join(odd.get(c, c) for c in text) + "\n")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode, a file name that is not UTF-8
    app()


if __name__ == "__main__":
    main()
