"""Checkpoints with files that stay open as long as the checkpoint is referenced."""

from __future__ import annotations

import weakref
from pathlib import Path

from transformers import PreTrainedConfig

from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Placing
from djinnd.device import Device
from djinnd.model.family.skeleton import make_config
from djinnd.model.placing.loader import ModelLoader
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.opening import open_checkpoint


def checkpoint_of(folder: Path, *, has_weights: bool = True) -> CheckpointFiles:
    files = ModelFiles.open(str(folder))
    try:
        checkpoint = open_checkpoint(files, has_weights=has_weights)
    except BaseException:
        files.close()
        raise
    weakref.finalize(checkpoint, files.close)
    return checkpoint


def loader_of(
    folder: Path,
    device: Device,
    dtype: str = "auto",
    placing: Placing | None = None,
    shared: str | None = None,
    name: str = "m",
) -> ModelLoader:
    return ModelLoader(name, checkpoint_of(folder, has_weights=shared is None), device, dtype, placing, shared)


def read_config(folder: Path) -> PreTrainedConfig:
    return make_config(checkpoint_of(folder, has_weights=False).config)
