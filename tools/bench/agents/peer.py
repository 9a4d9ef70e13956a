"""What this bench asks of transformers' continuous batching, and what it answers; it has a process of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.bench.agents.figures import Figures
from tools.bench.agents.plan import Work
from tools.bench.stream.outcome import Status
from tools.bench.stream.peers import run_apart

BEGIN_S = 600.0  # to load the model, to pin the host's memory, to capture


class BatchingJob(msgspec.Struct, kw_only=True, frozen=True):
    checkpoint: str
    device: str  # "cuda:0", or "cpu"
    dtype: str  # torch's name
    kv_tokens: int  # that its cache has room for
    host_bytes: int  # for what it offloads
    warm_up: Work
    works: list[Work]
    run_s: float  # after which a run is broken off
    outcome: str  # file that receives the Batched, as JSON


class Batched(msgspec.Struct, kw_only=True):
    status: Status
    note: str = ""  # why not
    attention: str = ""  # transformers' name of the implementation
    offload_bytes: int = 0  # of pinned host memory
    runs: list[Figures] = []  # one for each of the works


def batched(job: BatchingJob, folder: Path) -> Batched:
    """`folder` receives the job and what the process says."""
    asked, answer = folder / "batching.job.json", Path(job.outcome)
    asked.write_bytes(msgspec.json.encode(job))
    limit_s = BEGIN_S + job.run_s * (1 + len(job.works))
    end = run_apart("batching", [str(asked)], folder / "batching.log", limit_s)
    if answer.exists():
        return msgspec.json.decode(answer.read_bytes(), type=Batched)
    return Batched(status=Status.FAILED, note=end)
