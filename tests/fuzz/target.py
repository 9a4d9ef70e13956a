"""A fuzz target, and how one runs under atheris in a process of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Target(NamedTuple):
    """`check` returns for every bytes, or raises: an exception that the parser does not document is a finding.
    `seeds` are valid inputs, from which mutations begin. `parsers` are the modules that guide the search."""

    parsers: tuple[str, ...]
    seeds: Callable[[], Iterable[bytes]]
    check: Callable[[bytes], None]


def main() -> None:
    """`python -m tests.fuzz.target NAME CORPUS [libFuzzer's options]`."""
    import atheris

    name, corpus = sys.argv[1], Path(sys.argv[2])
    target: Target = importlib.import_module(f"tests.fuzz.{name}").TARGET
    with atheris.instrument_imports(include=list(target.parsers)):
        for parser in target.parsers:
            del sys.modules[parser]  # KeyError: the target names a module that it does not import
        target = importlib.reload(importlib.import_module(f"tests.fuzz.{name}")).TARGET
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *sys.argv[3:], str(corpus)], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
