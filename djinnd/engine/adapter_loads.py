"""Loads of adapters: each reads its files in a thread of its own, beside the steps.

The files are a client's, and may hang, for example on a network share: then only this thread and this load wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from djinn_client.errors import DjinnError, ModelNotFound, OutOfMemory
from djinn_client.files.model_files import ModelFiles
from djinnd.device import Device
from djinnd.engine.io.background import BackgroundTask, BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.kernels.compiler import KernelCompiler
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.messages import AdapterLoaded, DropAdapter, LoadAdapter
from djinnd.model.lora.image import LoraImage, read_image
from djinnd.model.lora.targets import Target
from djinnd.weights.reading import alone

log = logging.getLogger("djinnd.engine")


@dataclass(eq=False)
class AdapterLoads:
    """Used by the engine's thread."""

    _device: Device
    _runners: Mapping[str, ModelRunner]  # by model, a live view
    _channel: ServerChannel
    _background: BackgroundWork
    _compiler: KernelCompiler | None  # None: kernels are compiled at launch or not at all

    def load(self, message: LoadAdapter) -> None:
        """Answered by AdapterLoaded, or by Failed. Takes the message's descriptors."""
        self._background.start(message.request, self._load(message))

    def drop(self, message: DropAdapter) -> None:
        if (runner := self._runners.get(message.model)) is not None:
            runner.adapters.drop(message.identity)

    def _load(self, message: LoadAdapter) -> BackgroundTask:
        try:
            runner = self._runner(message)
            targets = runner.model.install_adapters().targets
            reading = alone(partial(_read, message, targets, runner.model.dtype, self._device), "djinn-adapter")
            reading.add_done_callback(lambda _: self._channel.wake())
            yield from self._compile(runner)
            yield reading
            image = _result(reading, message)
            if self._runner(message) is not runner:
                raise ModelNotFound(f"{message.model} was loaded anew meanwhile: try again", model=message.model)
        finally:
            _close(message)
        runner.adapters.add(image)
        self._channel.send(
            AdapterLoaded(message.request, image.identity, image.rank, image.modules, image.memory.nbytes)
        )

    def _compile(self, runner: ModelRunner) -> BackgroundTask:
        """Compiles the kernels of adapters in another process, before a request waits for them."""
        if self._compiler is None:
            return
        from djinnd.model.kernels.launching.launches import (
            launches,  # needs Triton, which only CUDA builds of torch bring
        )

        with launches.listing() as listed, self._device.computing():
            runner.model.install_adapters().launch_empty(runner.model.dtype)
        if not listed:
            return
        variants = [*listed]
        compiling = alone(partial(self._compiler.compile, variants, lambda done, total: None), "djinn-kernels")
        compiling.add_done_callback(lambda _: self._channel.wake())
        yield compiling
        error = compiling.exception()
        failed = compiling.result() if error is None else dict.fromkeys(variants, repr(error))
        for variant, reason in failed.items():
            log.warning("adapter_kernel_missing kernel=%s reason=%s", variant, reason)
        launches.settle(variants, failed)

    def _runner(self, message: LoadAdapter) -> ModelRunner:
        runner = self._runners.get(message.model)
        if runner is None:
            raise ModelNotFound(f"{message.model} was unloaded meanwhile: try again", model=message.model)
        return runner


def _read(message: LoadAdapter, targets: Sequence[Target], dtype: torch.dtype, device: Device) -> LoraImage:
    fds, message.fds = message.fds, []
    with ModelFiles.handed_over(message.folder, message.files, fds) as files:
        return read_image(files, targets, dtype, message.most_bytes, device.staging)


def _result(reading: Future[LoraImage], message: LoadAdapter) -> LoraImage:
    """The image that was read. Raises a DjinnError in any other case."""
    try:
        return reading.result()
    except DjinnError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the host has no memory for the adapter in {message.folder}: {error}") from error
    except Exception as error:
        log.exception("adapter_failed model=%s folder=%s", message.model, message.folder)
        raise DjinnError(f"reading the adapter in {message.folder} failed: {error!r}") from error


def _close(message: LoadAdapter) -> None:
    """Closes the descriptors that were not taken."""
    fds, message.fds = message.fds, []
    for fd in fds:
        os.close(fd)
