"""Opens a checkpoint as what it is: GGUF files, quantised tensors in safetensors, or plain ones."""

from __future__ import annotations

from djinn_client.files.model_files import ModelFiles
from djinnd.gguf.files import gguf_names
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.quantised.checkpoint import QuantisedCheckpoint
from djinnd.weights.quantised.configuration import quantisation_of


def open_checkpoint(files: ModelFiles, *, has_weights: bool = True) -> CheckpointFiles:
    """Reads headers and configuration. Raises ModelNotFound, and ModelRejected for files that cannot be served.

    has_weights: False if the files hold only the configuration, and the weights come from elsewhere.
    """
    if not has_weights:
        return CheckpointFiles(files, has_weights=False)
    names = gguf_names(files)
    if names:
        return GgufCheckpoint(files, names)
    return QuantisedCheckpoint(files) if quantisation_of(files) else CheckpointFiles(files)
