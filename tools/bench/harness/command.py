"""The command line of a bench: the options that benches share, progress messages, and the way out for its result."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console, RenderableType

import djinn_client as djinn
from tools.bench.harness.report import ROOT, keep, report

SHIPPED = ROOT / "djinnd" / "models" / "djinn-tiny"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True)

checkpoint = click.argument("checkpoint", type=FOLDER)
checkpoint_or_tiny = click.argument("checkpoint", type=FOLDER, default=SHIPPED)
device = click.option("--device", default="auto", show_default=True)
memory = click.option("--memory", default="0", show_default=True, help="Budget of the daemon; 0: its default.")
kv_gib = click.option(
    "--kv-gib", default=0.0, show_default=True, help="GiB of memory for KV pages; 0: as much as fits."
)
context = click.option("--context", default=512, show_default=True, help="Tokens of each prompt.")
kv = click.option("--kv", help="Device memory for KV pages; by default the daemon's choice.")
host_kv = click.option("--host-kv", help="Host memory for KV pages; by default the daemon's choice.")
disk_kv = click.option("--disk-kv", help="Disk space for KV pages; by default the daemon's choice.")
gguf = click.option("--gguf", type=FILE, help="The model in a GGUF file, to measure llama.cpp too.")
folder = click.option("--folder", type=FOLDER, help="Folder for the daemon's state and its KV on disk.")


def rounds(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = "Measurements of each figure; the median counts."
    return click.option("--rounds", default=default, show_default=True, help=text)


class Result(NamedTuple):
    """A bench's result: the parts of its report, and the tables for the terminal."""

    parameters: dict[str, Any]
    results: dict[str, Any]
    summary: str  # one line, for docs/results.md
    shown: Sequence[RenderableType] = ()
    experiment: str = ""  # instead of the bench's own name


def bench(experiment: str, doc: str, width: int = 0) -> Callable[[Callable[..., Result]], click.Command]:
    """Makes a command of a function that measures. The command shows the result and has `--json` and `--record`.

    The first paragraph of `doc` is the help text. `width`: the fewest columns that the result is shown in.
    """

    def command(measure: Callable[..., Result]) -> click.Command:
        @click.command(help=doc.split("\n\n", 1)[0])
        @functools.wraps(measure)
        def run(path: Path | None, recorded: bool, **options: Any) -> None:
            allow_connections()
            try:
                result = measure(**options)
            except djinn.DjinnError as error:
                raise click.ClickException(error.message) from error
            console = Console()
            console.width = max(console.width, width)
            for each in result.shown:
                console.print(each)
            named = result.experiment or experiment
            keep(report(named, result.parameters, result.results, result.summary), path, recorded=recorded)

        run.params += [
            click.Option(["--json", "path"], type=click.Path(path_type=Path), help="Write the result to this file."),
            click.Option(["--record", "recorded"], is_flag=True, help="Add the result to docs/results.md."),
        ]
        return run

    return command


def given(**options: Any) -> dict[str, Any]:
    """Leaves out the options without a value."""
    return {name: value for name, value in options.items() if value is not None}


def say(progress: str) -> None:
    click.echo(progress, err=True)


def allow_connections() -> None:
    """Raises this process's limit of open files as far as the system allows: each session has a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
