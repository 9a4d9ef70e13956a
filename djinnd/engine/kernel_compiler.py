"""The engine's side of compiling kernels: it starts a process for that (kernel_process.py), waits for it, and stops it.

Nothing here runs in the way of steps: a load waits in a thread of its own, and only a launch that nobody has foreseen
makes the engine's thread wait, which says meanwhile that it is alive.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

import torch

if TYPE_CHECKING:  # Triton comes with CUDA builds of torch
    from djinnd.model.kernels.variants import Variant

log = logging.getLogger("djinnd.engine")

Told = Callable[[int, int], None]  # variants done, variants in all

_TELL_EVERY = 0.5  # seconds, at most, between two calls of `told`
_STARTS_IN = 60.0  # seconds that the process has to import what it needs
_AT_ONCE = 2  # processes; other loads wait for one of them


class KernelCompiler:
    """Used by any thread; each call has a process of its own."""

    def __init__(self, arch: int, shared_memory: int, seconds: float) -> None:
        """`arch`: the GPU's compute capability, as 90. `shared_memory`: bytes that a program may have on it. `seconds`:
        for one variant."""
        self._arguments = ["--arch", str(arch), "--shared-memory", str(shared_memory), "--seconds", str(seconds)]
        self._seconds = seconds
        self._turns = threading.Semaphore(_AT_ONCE)

    def compile(self, variants: Sequence[Variant], told: Told) -> dict[Variant, str]:
        """Returns when all of them lie in Triton's cache, but for those that it answers with the reason. `told` is
        called at least twice a second; what it raises is raised, and nothing is left running."""
        began, reasons = (
            time.monotonic(),
            dict.fromkeys(variants, "the compiling process ended, or was silent, before that was done"),
        )
        while not self._turns.acquire(timeout=_TELL_EVERY):
            told(0, len(variants))
        try:
            self._run(variants, reasons, told)
        finally:
            self._turns.release()
        failed = {variant: reason for variant, reason in reasons.items() if reason}
        seconds = time.monotonic() - began
        log.info("kernels_compiled variants=%d failed=%d seconds=%.1f", len(variants), len(failed), seconds)
        for variant, reason in failed.items():
            log.warning("kernel_unavailable kernel=%s reason=%s", variant, reason)
        return failed

    def _run(self, variants: Sequence[Variant], reasons: dict[Variant, str], told: Told) -> None:
        """In the engine's process group, with which the server kills an engine."""
        jobs = max(1, len(os.sched_getaffinity(0)) - 2)  # but for the step loop and the server
        command = [sys.executable, "-P", "-m", "djinnd.engine.kernel_process", "--parent", str(os.getpid())]
        command += [*self._arguments, "--jobs", str(jobs)]
        with (
            open(os.memfd_create("djinn-kernels", os.MFD_CLOEXEC), "w+") as lines,
            subprocess.Popen(command, stdin=_filled(lines, variants), stdout=subprocess.PIPE) as process,
        ):
            try:
                self._follow(process, variants, reasons, told)
            finally:
                process.kill()

    def _follow(
        self, process: subprocess.Popen[bytes], variants: Sequence[Variant], reasons: dict[Variant, str], told: Told
    ) -> None:
        """Until it ends, or is silent for longer than one variant may take."""
        assert process.stdout is not None
        done, pending, heard = 0, b"", time.monotonic()
        told(0, len(variants))
        while time.monotonic() < heard + self._seconds + _STARTS_IN:
            if not select.select([process.stdout], (), (), _TELL_EVERY)[0]:
                told(done, len(variants))
                continue
            data, heard = os.read(process.stdout.fileno(), 1 << 16), time.monotonic()
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for number, reason in map(json.loads, lines):
                reasons[variants[number]] = reason
            done += len(lines)
            told(done, len(variants))


def _filled(lines: IO[str], variants: Sequence[Variant]) -> IO[str]:
    lines.writelines(json.dumps(variant) + "\n" for variant in variants)
    lines.seek(0)
    return lines


def kernel_compiler_for(device: torch.device, seconds: float) -> KernelCompiler | None:
    """None: the device has no kernels of ours."""
    if device.type != "cuda":
        return None
    from djinnd.model.kernels.scratch import shared_memory  # Triton comes with CUDA builds of torch

    major, minor = torch.cuda.get_device_capability(device)
    return KernelCompiler(10 * major + minor, shared_memory(device), seconds)


class Compiling:
    """A thread that compiles what a load needs. `wake` is called when it is over."""

    def __init__(
        self, compiler: KernelCompiler, variants: Sequence[Variant], told: Told, wake: Callable[[], None]
    ) -> None:
        self.variants = variants
        self.failed: Mapping[Variant, str] = {}
        self._stopped = False
        self._is_over = False
        self._thread = threading.Thread(
            target=self._run, args=(compiler, variants, told, wake), name="djinn-kernels", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def stop(self) -> None:
        """Returns when the thread and its process have ended."""
        self._stopped = True
        self._thread.join()

    def _run(self, compiler: KernelCompiler, variants: Sequence[Variant], told: Told, wake: Callable[[], None]) -> None:
        def tell(done: int, total: int) -> None:
            if self._stopped:
                raise _Stopped
            told(done, total)

        try:
            self.failed = compiler.compile(variants, tell)
        except Exception as error:
            if not isinstance(error, _Stopped):
                log.warning("compiling_failed error=%r", error)
            self.failed = dict.fromkeys(variants, f"compiling was broken off: {error!r}")
        self._is_over = True
        wake()


class _Stopped(Exception):
    """Nobody wants these kernels any more."""
