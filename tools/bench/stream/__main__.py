"""The command: it reads an experiment's file or a checkpoint, and writes a table and a JSON file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from rich.console import Console

from djinn_client.errors import DjinnError, InvalidRequest
from tools.bench.harness.command import say
from tools.bench.harness.report import Report, record, report, save
from tools.bench.stream import checkpoint
from tools.bench.stream.experiment import SERVED, Contender, Experiment, read
from tools.bench.stream.outcome import Results
from tools.bench.stream.run import Run, measure_bus
from tools.bench.stream.table import WIDTH, summary, table


class Numbers(click.ParamType[tuple[int, ...]]):
    name = "N,N,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in str(value).split(",") if number)
        except ValueError:
            self.fail(f"{value!r} is no list of numbers as in 16,64", param, ctx)


@click.command(
    help="A model larger than the device memory it is given: djinnd beside its peers. WHAT is a YAML file of "
    "tools/bench/configs, or a checkpoint's folder."
)
@click.argument("what", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--checkpoint",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of the experiment's checkpoint, which is made if it is missing; by default a temporary folder.",
)
@click.option("--memory", help="Budget of device memory, instead of the experiment's.")
@click.option("--runs", type=click.IntRange(1), help="Measurements of each figure, instead of the experiment's.")
@click.option(
    "--chunk-size-mb",
    "pieces",
    type=Numbers(),
    default="",
    help="Repeat one session's decode with copies of these sizes, in MiB.",
)
@click.option("--ttft/--no-ttft", default=None, help="Measure the prompt's first token, or leave it out.")
@click.option("--only", multiple=True, type=click.Choice(get_args(Contender)), help="This contender; may be repeated.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path), help="Write the result to this file, after each contender."
)
@click.option("--record", "recorded", is_flag=True, help="Add the result to docs/results.md.")
def main(
    what: Path,
    folder: Path | None,
    memory: str | None,
    runs: int | None,
    pieces: tuple[int, ...],
    ttft: bool | None,
    only: tuple[Contender, ...],
    path: Path | None,
    recorded: bool,
) -> None:
    changes = {"memory": memory, "runs": runs, "ttft": ttft, "contenders": only or None}
    try:
        experiment = read(what) if what.is_file() else Experiment(name=what.name)
        experiment = msgspec.structs.replace(experiment, **{k: v for k, v in changes.items() if v is not None})
        result = measure(experiment, folder or (what if what.is_dir() else None), pieces, path)
    except DjinnError as error:
        raise click.ClickException(error.message) from error
    if recorded:
        record(result)


def measure(experiment: Experiment, folder: Path | None, pieces: tuple[int, ...], path: Path | None) -> Report:
    shared = experiment.model if experiment.weights == "shared" else None
    if shared is None and experiment.weights == "shared":
        raise InvalidRequest(f"{experiment.name} has weights that a client hands over: name their shape in `model`")
    if shared is not None and (alone := [name for name in experiment.contenders if name not in SERVED]):
        raise InvalidRequest(f"{experiment.name}: weights that a client hands over are djinnd's, not {alone[0]}'s")
    parameters = msgspec.to_builtins(experiment) | {"memory_bytes": experiment.memory_bytes}

    def reported(results: Results) -> Report:
        return report("stream", parameters, msgspec.to_builtins(results), summary(results, experiment.prompt))

    def keep(results: Results) -> None:
        if path:
            save(reported(results), path)

    say("the bus")
    results = measure_bus(experiment.device, pieces)
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as between:
        where = folder or Path(between) / "checkpoint"
        if shared is None and experiment.model is not None:
            say(f"the checkpoint: {where}")
            checkpoint.make(experiment.model, where, results.device)
        of_it = checkpoint.find(where) if shared is None else checkpoint.handed_over(shared)
        Run(experiment, of_it, results, Path(between), say, keep)(pieces)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(experiment.name, results))
    return reported(results)


if __name__ == "__main__":
    main()
