"""Runs a peer as a contender, in a process of its own, so that a crash is a result too."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tools.bench.harness.report import ROOT
from tools.bench.stream.experiment import Contender
from tools.bench.stream.outcome import Job, Outcome, Status


class Peer(NamedTuple):
    module: str
    package: str  # package that must be installed
    needs_cuda: bool = True
    arguments: tuple[str, ...] = ()


PEERS: dict[Contender, Peer] = {
    "gpu-only": Peer("transformers", "transformers", needs_cuda=False),
    "accelerate": Peer("accelerate", "accelerate"),
    "diffusers": Peer("diffusers", "diffusers"),
    "deepspeed": Peer("deepspeed", "deepspeed"),
    "deepspeed-persistent": Peer("deepspeed", "deepspeed", arguments=("persistent",)),
}


def measure(contender: Contender, job: Job, folder: Path, limit_s: float) -> Outcome:
    """Measures a peer. `folder` receives the job's file and the process's log."""
    peer = PEERS[contender]
    if peer.needs_cuda and job.device == "cpu":
        return Outcome(status=Status.SKIPPED, note="needs CUDA")
    if importlib.util.find_spec(peer.package) is None:
        return Outcome(status=Status.SKIPPED, note=f"{peer.package} is not installed")
    asked, said = folder / f"{contender}.job.json", folder / f"{contender}.log"
    asked.write_bytes(msgspec.json.encode(job))
    end = run_apart(peer.module, (str(asked), *peer.arguments), said, limit_s)
    answer = Path(job.outcome)
    if answer.exists():
        return msgspec.json.decode(answer.read_bytes(), type=Outcome)
    return Outcome(status=Status.FAILED, note=end)


def run_apart(module: str, arguments: Sequence[str], said: Path, limit_s: float) -> str:
    """Runs a peer's process to its end; `said` receives its output. Returns the kind of its end and the output's last
    line."""
    command = [sys.executable, "-m", f"tools.bench.peers.{module}", *arguments]
    with said.open("w") as log:
        try:
            ended = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no result within {limit_s:.0f} s"
    return f"{_how(ended.returncode)}: {_last_line(said)}"


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
