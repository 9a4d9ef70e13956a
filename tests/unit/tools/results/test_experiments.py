from __future__ import annotations

import importlib.util

import pytest

from tools.results.experiments import EXPERIMENTS, experiment_of
from tools.results.raw import FOLDER, ROOT, read_all


@pytest.mark.parametrize("module", sorted({each.module for each in EXPERIMENTS.values()}))
def test_the_bench_of_every_experiment_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_files_that_the_commands_name_exist() -> None:
    commands = [experiment_of(each.experiment).command(each) for each in read_all(FOLDER)]
    files = [word for command in commands for word in command.split() if word.endswith(".yaml")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
