"""The job that transformers' continuous batching gets from this bench, and its answer. It runs in its own process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.bench.agents.figures import Figures
from tools.bench.agents.plan import Work
from tools.bench.stream.outcome import Status
from tools.bench.stream.peers import run_apart

BEGIN_S = 600.0  # to load the model, pin host memory, and capture graphs


class BatchingJob(msgspec.Struct, kw_only=True, frozen=True):
    checkpoint: str
    device: str  # "cuda:0", or "cpu"
    dtype: str  # torch's name
    kv_tokens: int  # room of its KV cache
    host_bytes: int  # host memory for KV that it offloads
    warm_up: Work
    works: list[Work]
    run_s: float  # a run is stopped after this time
    outcome: str  # file that receives a Batched as JSON


class Batched(msgspec.Struct, kw_only=True):
    status: Status
    note: str = ""  # the reason of a failure
    attention: str = ""  # transformers' name of the attention implementation
    offload_bytes: int = 0  # pinned host memory
    runs: list[Figures] = []  # one for each piece of work


def batched(job: BatchingJob, folder: Path) -> Batched:
    """Runs the job. `folder` receives the job's file and the process's log."""
    asked, answer = folder / "batching.job.json", Path(job.outcome)
    asked.write_bytes(msgspec.json.encode(job))
    limit_s = BEGIN_S + job.run_s * (1 + len(job.works))
    end = run_apart("batching", [str(asked)], folder / "batching.log", limit_s)
    if answer.exists():
        return msgspec.json.decode(answer.read_bytes(), type=Batched)
    return Batched(status=Status.FAILED, note=end)
