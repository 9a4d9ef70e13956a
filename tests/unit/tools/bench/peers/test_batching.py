from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.support.models import tiny_model
from tools.bench.agents.peer import BatchingJob
from tools.bench.agents.plan import Work
from tools.bench.peers.batching import measure
from tools.bench.stream.outcome import Status


def test_each_turn_sends_the_whole_history_and_gets_its_tokens_one_by_one(tmp_path: Path) -> None:
    work = Work(agents=2, context=40, observation=8, answer=4, loops=2, tool_s=(0.0, 0.01))
    job = BatchingJob(
        checkpoint=str(tiny_model()),
        device="cpu",
        dtype="float32",
        kv_tokens=1024,
        host_bytes=1 << 20,
        warm_up=work,
        works=[work],
        run_s=60.0,
        outcome=str(tmp_path / "unused"),
    )
    with ExitStack() as stack:
        found = measure(job, stack)
    assert (found.status, found.offload_bytes) == (Status.MEASURED, 0)  # the CPU needs no pinned memory
    (run,) = found.runs
    assert (run.answers, run.wanted, run.failures) == (4, 4, [])
    assert run.between_tokens.count == 4 * 3 and run.computed_anew is None
