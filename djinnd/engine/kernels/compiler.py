"""Compiles kernels for the engine in a process of its own (process.py): starts it, follows it, stops it.

Steps do not wait for this: a load compiles on its own thread. Only the launch of a kernel that no load foresaw makes
the engine's thread wait, and it keeps sending Alive meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, TYPE_CHECKING

import torch

from djinnd.engine.tuning import COMPILER_STARTS_IN, COMPILERS, TELL_EVERY

if TYPE_CHECKING:  # only CUDA builds of torch bring Triton
    from djinnd.model.kernels.launching.variants import Variant

log = logging.getLogger("djinnd.engine")

Told = Callable[[int, int], None]  # variants done, variants in all


class KernelCompiler:
    """May be used by any thread; each call starts a process."""

    def __init__(self, arch: int, shared_memory: int, seconds: float) -> None:
        """`arch`: the GPU's compute capability, such as 90. `shared_memory`: bytes that a program may use on it.
        `seconds`: time limit for one variant."""
        self._arguments = ["--arch", str(arch), "--shared-memory", str(shared_memory), "--seconds", str(seconds)]
        self._seconds = seconds
        self._turns = threading.Semaphore(COMPILERS)

    def compile(self, variants: Sequence[Variant], told: Told) -> dict[Variant, str]:
        """Compiles the variants into Triton's cache. → the variants that failed, with the reason. `told` is called at
        least twice a second. An exception from it stops the process and is raised."""
        began, reasons = (
            time.monotonic(),
            dict.fromkeys(variants, "the compiling process ended or stopped answering before it had compiled this"),
        )
        while not self._turns.acquire(timeout=TELL_EVERY):
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
        """The process stays in the engine's process group, which the server kills with the engine."""
        jobs = max(1, len(os.sched_getaffinity(0)) - 2)  # leave cores for the step loop and the server
        command = [sys.executable, "-P", "-m", "djinnd.engine.kernels.process", "--parent", str(os.getpid())]
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
        """Reads results until the process ends, or is silent for longer than one variant may take."""
        assert process.stdout is not None
        done, pending, heard = 0, b"", time.monotonic()
        told(0, len(variants))
        while time.monotonic() < heard + self._seconds + COMPILER_STARTS_IN:
            if not wait([process.stdout.fileno()], TELL_EVERY):
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
    """→ None if the device runs no kernels of ours."""
    if device.type != "cuda":
        return None
    from djinnd.model.kernels.launching.gpu import shared_memory  # only CUDA builds of torch bring Triton

    major, minor = torch.cuda.get_device_capability(device)
    return KernelCompiler(10 * major + minor, shared_memory(device), seconds)


class Compiling:
    """A thread that compiles the kernels of a load. `wake` is called when it is done."""

    def __init__(
        self, compiler: KernelCompiler, variants: Sequence[Variant], told: Told, wake: Callable[[], None]
    ) -> None:
        self.variants = variants
        self.failed: Mapping[Variant, str] = {}
        self.is_over = False
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(compiler, variants, told, wake), name="djinn-kernels", daemon=True
        )
        self._thread.start()

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
            self.failed = dict.fromkeys(variants, f"compiling was interrupted: {error!r}")
        self.is_over = True
        wake()


class _Stopped(Exception):
    """The load is gone, so its kernels are not needed."""
