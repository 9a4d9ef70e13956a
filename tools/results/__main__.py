"""Writes docs/results.md from the raw files in docs/results.

python -m tools.results            writes the page
python -m tools.results check      fails if the page is not what the raw files give
python -m tools.results add FILE…  takes over runs that were measured on another machine
"""

from __future__ import annotations

from pathlib import Path

import click

from tools.results.raw import FOLDER, read, read_all
from tools.results.table import add, page, table_of, write


@click.group(invoke_without_command=True, help=__doc__)
@click.pass_context
def main(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        write()


@main.command("check")
def check_page() -> None:
    if table_of(FOLDER).read_text() != page(read_all(FOLDER)):
        raise click.ClickException("docs/results.md is not what docs/results gives: run `python -m tools.results`")


@main.command("add")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def add_runs(files: tuple[Path, ...]) -> None:
    for file in files:
        add(read(file))


if __name__ == "__main__":
    main()
