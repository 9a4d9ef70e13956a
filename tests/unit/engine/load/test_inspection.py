"""Answers of an inspection, compared with the engine's own planning of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol.fields.placing import ModelPlan
from djinnd.engine.load.inspection import inspect
from djinnd.messages import DescribeImage, DeviceFigures, Failed, ImageDescribed, Plan, Planned
from djinnd.messages.inspections import Inspect, Passed
from tests.support.checkpoints import altered
from tests.support.rates import RATES
from tests.unit.engine.load.test_planning import MEMORY, TOKENS, planned

FIGURES = DeviceFigures("cpu", MEMORY, MEMORY, 0, RATES, TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return altered(tmp_path_factory.mktemp("inspected") / "m", "llama-3.1", lambda tensors: tensors)


def inspected(folder: Path, job: Any = None, figures: DeviceFigures = FIGURES, is_plan: bool = True) -> Any:
    job = job or Plan(1, "m", str(folder))
    files = ModelFiles.open(str(folder))
    job.files = list(files)
    return inspect(Inspect(job, figures, is_plan), [files.descriptor(name) for name in job.files])


def test_an_inspection_s_plan_equals_the_engine_s(folder: Path) -> None:
    answer = inspected(folder)
    assert isinstance(answer, Planned)
    assert answer.plan == msgspec.structs.replace(planned(folder), model="m")
    assert isinstance(answer.plan, ModelPlan)


def test_a_plan_needs_no_device(folder: Path) -> None:
    answer = inspected(folder, figures=msgspec.structs.replace(FIGURES, kind="cuda"))
    assert isinstance(answer, Planned) and answer.plan.blocks > 0


def test_a_sound_checkpoint_passes_and_its_image_is_described(folder: Path) -> None:
    assert isinstance(inspected(folder, is_plan=False), Passed)
    job = DescribeImage(1, "m", str(folder), "float32", Plan(1, "m", "").placing, "float32")
    described = inspected(folder, job, is_plan=False)
    assert isinstance(described, ImageDescribed) and described.image.nbytes > 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_hidden_layers": 100_000}, "model_rejected"),
        ({"hidden_size": "x" * 1000}, "model_rejected"),
        ({"model_type": "no such family"}, "model_rejected"),
    ],
)
def test_a_rejected_checkpoint_is_the_caller_s_fault(
    folder: Path, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    answer = inspected(tmp_path, is_plan=False)
    assert isinstance(answer, Failed) and answer.code == code and answer.message


def test_too_small_a_budget_is_refused_with_its_figures(folder: Path) -> None:
    answer = inspected(folder, Plan(1, "m", str(folder), memory_bytes=1))
    assert isinstance(answer, Failed) and answer.code == "out_of_memory"
    assert answer.data["needed"] > 1
