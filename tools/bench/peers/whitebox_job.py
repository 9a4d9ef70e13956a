"""Peers that stop inside a model, edit and continue: their job, their answer and their process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.bench.stream.outcome import Status
from tools.bench.stream.peers import run_apart

PEERS = ("hooks", "nnsight")
LIMIT_S = 300.0


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """Each prompt is run with the output of some block scaled, and continued to its last token."""

    checkpoint: str
    device: str  # "cuda:0", or "cpu"
    dtype: str  # torch's name
    prompts: list[list[int]]
    blocks: list[int]
    scale: float
    tokens: int
    answer: str  # file that receives the Answer as JSON, again after each peer


class Edited(msgspec.Struct, kw_only=True):
    """One figure for each prompt."""

    seconds: list[float]
    tokens: list[list[int]]


class Outcome(msgspec.Struct, kw_only=True):
    """The figures of one peer."""

    status: Status
    note: str = ""  # the reason of a failure
    edited: dict[int, Edited] = {}  # by the number of blocks before the edit


class Answer(msgspec.Struct, kw_only=True):
    """Figures of all peers that have been measured."""

    plain: list[list[int]] = []  # transformers' tokens, without an edit
    peers: dict[str, Outcome] = {}


def measure(job: Job, folder: Path) -> Answer:
    """Runs all peers. `folder` receives the job's file and the process's log."""
    asked, said = folder / "job.json", folder / "peers.log"
    asked.write_bytes(msgspec.json.encode(job))
    end = run_apart("whitebox", (str(asked),), said, LIMIT_S)
    there = Path(job.answer)
    answer = msgspec.json.decode(there.read_bytes(), type=Answer) if there.exists() else Answer()
    for name in PEERS:
        answer.peers.setdefault(name, Outcome(status=Status.FAILED, note=end))
    return answer
