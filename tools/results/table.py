"""docs/results.md: one row for each experiment, case and card, the latest run of each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.results.experiments import EXPERIMENTS, Experiment, experiment_of
from tools.results.raw import FOLDER, Report, read_all, save

HEAD = """# Results

This page is generated from the raw files in `docs/results` by `python -m tools.results`: one row for each experiment,
case and card, with its latest run. A date links to the raw file, which has the versions and every single value.
A tree with a `+` had changes that were not committed. Models have random weights in bf16, in the shape that is named.
Times are medians unless a row says otherwise.

A bench that runs with `--record` replaces its row, and `python -m tools.results add FILE.json` adds a run from another
machine. Earlier runs are in git's history; [the log](log/README.md) tells what was learned from them.

| date and tree | machine | what was measured, and how | djinnd | others in the same run |
|---|---|---|---|---|
"""


def key(result: Report) -> tuple[str, str, str]:
    """Two runs with one key are runs of the same experiment; the later one supersedes the other."""
    return result.experiment, result.card, experiment_of(result.experiment).case(result)


def latest(results: Iterable[Report]) -> list[Report]:
    """The last run of each key, in the order of the experiments."""
    newest = {key(each): each for each in sorted(results, key=lambda one: one.at)}
    order = list(EXPERIMENTS)

    def place(one: Report) -> tuple[int, bool, str]:
        return (order.index(one.experiment) if one.experiment in order else len(order), one.card == "CPU", one.at)

    return sorted(newest.values(), key=place)


def row(result: Report) -> str:
    what: Experiment = experiment_of(result.experiment)
    cells = (
        f"[{result.at[:10]}](results/{result.name}.json) `{result.commit}`",
        result.machine,
        f"{what.question} {what.case(result)}<br>`{what.command(result)}`",
        what.figures(result),
        what.peers(result),
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |\n"


def page(results: Iterable[Report]) -> str:
    return HEAD + "".join(row(each) for each in latest(results))


def table_of(folder: Path) -> Path:
    return folder.with_suffix(".md")


def write(folder: Path = FOLDER) -> None:
    table_of(folder).write_text(page(read_all(folder)))


def add(result: Report, folder: Path = FOLDER) -> None:
    """Stores the run, deletes the runs that it supersedes, and writes the page anew."""
    row(result)  # fails before anything is changed, if the figures do not fit the words
    save(result, folder / f"{result.name}.json")
    kept = {each.name for each in latest(read_all(folder))}
    for path in folder.glob("*.json"):
        if path.stem not in kept:
            path.unlink()
    write(folder)
