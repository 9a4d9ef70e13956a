"""`python -m djinnd.engine.load.inspection`: inspects a checkpoint that no administrator has configured, in a sandbox.

The JSON files and the headers of safetensors are read here first, and the model's modules are built on the meta device,
with limits for memory and time. So the engine only builds checkpoints that have passed. The fork server forks this
process, or the server starts it; one process inspects one checkpoint.
"""

from __future__ import annotations

import tempfile
from typing import cast

import msgspec
import torch

from djinn_client.errors import DjinnError
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import decoded, framed
from djinnd.confinement.channel import ConfinedChannel
from djinnd.confinement.child import begin
from djinnd.core.rates import Rates
from djinnd.device import Device
from djinnd.device.budget import MemoryBudget
from djinnd.engine.load.loading import model_shape
from djinnd.engine.load.planning import describe
from djinnd.messages import DescribeImage, DeviceFigures, Failed, ImageDescribed, Planned
from djinnd.messages.inspections import Confined, Inspect, Passed
from djinnd.model.placing.image import image_of
from djinnd.model.placing.loader import ModelLoader
from djinnd.weights.opening import open_checkpoint

_MAX_FRAME = 1 << 20
_DESCRIPTORS = 512  # a checkpoint has up to 240 files, and each is passed as a descriptor

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Inspect] = msgspec.msgpack.Decoder(Inspect)

Answer = Planned | ImageDescribed | Passed | Failed


class DescribedDevice:
    """A device with the figures of the engine's device: the part of Device that planning uses."""

    def __init__(self, figures: DeviceFigures) -> None:
        self.torch_device = torch.device(figures.kind)
        self.budget = MemoryBudget(figures.budget_bytes)
        self.budget.reserve("what is loaded", figures.budget_bytes - figures.free_bytes)
        self.reserved = figures.reserved_bytes
        self._rates = figures.rates

    def rates(self) -> Rates:
        return self._rates


def inspect(message: Inspect, fds: list[int]) -> Answer:
    """Owns the descriptors."""
    job = message.job
    try:
        with ModelFiles.handed_over(job.path, job.files, fds) as files:
            return _inspected(message, files)
    except DjinnError as error:
        return Failed(job.request, error.code, error.message, error.data)
    except MemoryError:
        return Failed(job.request, "model_rejected", f"{job.model}: inspecting the checkpoint takes too much memory")
    except Exception as error:
        return Failed(job.request, "model_rejected", f"{job.model} cannot be built: {error!r}"[:2000])


def _inspected(message: Inspect, files: ModelFiles) -> Answer:
    job = message.job
    device = cast(Device, DescribedDevice(message.figures))
    checkpoint = open_checkpoint(files, has_weights=job.shared is None)
    loader = ModelLoader(job.model, checkpoint, device, job.dtype, job.placing, job.shared)
    if isinstance(job, DescribeImage):
        return ImageDescribed(job.request, image_of(loader))
    shape = model_shape(loader)
    if not message.is_plan:
        return Passed()
    return Planned(job.request, describe(job, loader, shape, device, message.figures.max_batch_tokens))


def main() -> None:
    child = begin(__doc__)
    tempfile.tempdir = "/tmp"  # parts of torch ask for its name when they are imported; no file can be created there
    torch.set_num_threads(1)
    channel: ConfinedChannel[Inspect, Confined | Answer] = ConfinedChannel(
        child.server,
        _MAX_FRAME,
        lambda payload: decoded(_decoder, payload),
        lambda said: framed(_encode(said)),
    )
    channel.send(Confined(child.close_sandbox(_DESCRIPTORS)))
    for message, fds in channel.messages():
        channel.send(inspect(message, fds))
        return


if __name__ == "__main__":
    main()
