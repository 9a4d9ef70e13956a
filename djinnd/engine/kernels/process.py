"""`python -m djinnd.engine.kernels.process`: compiles variants of kernels for an engine, several at a time.

    stdin     one line of JSON for each variant: [module, name, specialization]
    stdout    one line of JSON for each variant when it is done: [its number, reason why it failed, or ""]

Each variant is compiled in a fork of this process, because LLVM and ptxas have no deadline and only a process can be
stopped. No fork uses a device. Forks run at a low priority, so that the engine's step loop keeps its cores. They end
with this process, and this process ends with the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NamedTuple

from triton.backends.compiler import GPUTarget

from djinnd.engine.tuning import MOST_MEMORY, NICENESS
from djinnd.lifeline import tie_to
from djinnd.model.kernels.launching.variants import Variant, compile_variant, settle_keys

_REASON_BYTES = 2000  # less than a pipe takes without a reader


class CompilerLimits(NamedTuple):
    target: GPUTarget
    shared_memory: int  # bytes that a program may use on that GPU
    seconds: float  # time limit for one variant


class RunningCompiler(NamedTuple):
    number: int
    pid: int
    reason: int  # a pipe: the fork writes here why it failed, or "ok"
    deadline: float


def compile_all(variants: list[Variant], jobs: int, limits: CompilerLimits) -> None:
    waiting = deque(enumerate(variants))
    running: dict[int, RunningCompiler] = {}  # by pidfd
    while waiting or running:
        while waiting and len(running) < jobs:
            pidfd, fork = _start(*waiting.popleft(), limits)
            running[pidfd] = fork
        until = min(fork.deadline for fork in running.values())
        ended = wait([*running], max(0.0, until - time.monotonic()))
        for pidfd in [*running]:
            if pidfd in ended or time.monotonic() >= running[pidfd].deadline:
                _tell(running[pidfd].number, _end(pidfd, running.pop(pidfd), limits.seconds))


def _start(number: int, variant: Variant, limits: CompilerLimits) -> tuple[int, RunningCompiler]:
    parent, (reading, writing) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.write(writing, _compile(variant, limits, parent).encode()[:_REASON_BYTES])
        os._exit(0)
    os.close(writing)
    return os.pidfd_open(pid), RunningCompiler(number, pid, reading, time.monotonic() + limits.seconds)


def _compile(variant: Variant, limits: CompilerLimits, parent: int) -> str:
    """Runs in the fork. → the reason why the variant could not be compiled, or "ok"."""
    tie_to(parent)
    seconds = int(limits.seconds) + 1
    # ptxas inherits the limit, and may outlive this process
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    try:
        shared = compile_variant(variant, limits.target)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if shared > limits.shared_memory:
        return f"its programs need {shared:,} bytes of shared memory, the GPU has {limits.shared_memory:,}"
    return "ok"


def _end(pidfd: int, fork: RunningCompiler, seconds: float) -> str:
    """Ends a fork that is done or too late. → the reason why its variant could not be compiled, or ""."""
    with suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)
    _, status = os.waitpid(fork.pid, 0)
    os.close(pidfd)
    os.set_blocking(fork.reason, False)
    with suppress(BlockingIOError), open(fork.reason, "rb") as pipe:
        if told := pipe.read(_REASON_BYTES):
            return "" if told == b"ok" else told.decode(errors="replace")
    if time.monotonic() >= fork.deadline:
        return f"compiling it takes more than {seconds:g} s"
    return f"the compiler was ended by signal {os.waitstatus_to_exitcode(status) * -1}"


def _tell(number: int, reason: str) -> None:
    print(json.dumps([number, reason]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="Pid of the engine, with which this process exits.")
    parser.add_argument("--arch", type=int, required=True, help="The GPU's compute capability, such as 90.")
    parser.add_argument("--shared-memory", type=int, required=True, help="Bytes that a program may use on that GPU.")
    parser.add_argument("--seconds", type=float, required=True, help="Time limit for one variant.")
    parser.add_argument("--jobs", type=int, required=True, help="Variants to compile at a time.")
    given = parser.parse_args()
    tie_to(given.parent)
    os.nice(NICENESS)
    settle_keys()
    limits = CompilerLimits(GPUTarget("cuda", given.arch, 32), given.shared_memory, given.seconds)
    compile_all([Variant(*json.loads(line)) for line in sys.stdin], given.jobs, limits)


if __name__ == "__main__":
    main()
