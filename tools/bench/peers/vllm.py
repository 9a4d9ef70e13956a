"""vLLM's offline interface, where it is installed: prompts that come at once, in a process for each way to run it.

    python -m tools.bench.peers.vllm JOB.json

Its engine is in that process, or in a process of its own. CUDA graphs are on, as by default. Prefixes are not cached,
because no two prompts are equal. Prompts and answers are token ids: vLLM has no tokenizer here, and makes no text.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from tools.bench.harness.command import say
from tools.bench.harness.prompts import prompt
from tools.bench.stream.outcome import Status
from tools.bench.stream.peers import run_apart

PACKAGE = "vllm"
DEVICE = "cuda:0"  # the one that vLLM takes by itself
WAYS = {"vLLM in-process": False, "vLLM own process": True}  # whether its engine has a process of its own
LIMIT_S = 1800.0  # to load the model, compile it, capture graphs and run all loads

Prompts = Callable[[int], list[int]]  # tokens → a prompt that no measurement has had


class Model(msgspec.Struct, kw_only=True, frozen=True):
    """The model as the daemon serves it."""

    checkpoint: str
    dtype: str  # torch's name
    vocab: int
    device: str  # the daemon's
    memory: int  # bytes of device memory for everything


class Load(msgspec.Struct, kw_only=True, frozen=True):
    """Prompts that come at once, in several rounds."""

    prompts: int
    context: int  # tokens of each prompt
    tokens: int  # of each answer
    rounds: int


class Job(msgspec.Struct, kw_only=True, frozen=True):
    model: Model
    own_process: bool
    loads: list[Load]
    answer: str  # file that receives the Answer, as JSON


class Ran(msgspec.Struct, kw_only=True):
    """One round of a load."""

    whole_s: float  # from the call to its return
    first_s: list[float]  # from a request's arrival to its first token, for each prompt
    between_s: list[float]  # mean time between an answer's tokens, for each prompt
    step_s: float  # the same of the prompt with the latest first token: no prompt is computed during its steps


class Answer(msgspec.Struct, kw_only=True):
    status: Status
    note: str = ""  # the reason why nothing was measured
    rounds: list[list[Ran]] = []  # by load, without the round that warms up


# --- the caller -------------------------------------------------------------------------------------------------------


def both_ways(model: Model, loads: Sequence[Load]) -> dict[str, Answer]:
    """Runs the loads in each of the WAYS. The caller holds no device memory that `model.memory` counts."""
    found = {}
    for name, own_process in WAYS.items():
        say(name)
        with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
            answer = str(Path(folder) / "answer.json")
            found[name] = run(Job(model=model, own_process=own_process, loads=list(loads), answer=answer))
    return found


def run(job: Job) -> Answer:
    """Runs a job to its end. Its file and its process's log lie beside its answer."""
    if importlib.util.find_spec(PACKAGE) is None:
        return Answer(status=Status.SKIPPED, note="not installed")
    if job.model.device != DEVICE:
        return Answer(status=Status.SKIPPED, note=f"measured on {DEVICE} only")
    there = Path(job.answer)
    asked = there.with_name("job.json")
    asked.write_bytes(msgspec.json.encode(job))
    end = run_apart("vllm", [str(asked)], there.with_name("vllm.log"), LIMIT_S)
    if there.exists():
        return msgspec.json.decode(there.read_bytes(), type=Answer)
    return Answer(status=Status.FAILED, note=end)


# --- the process ------------------------------------------------------------------------------------------------------


def environment(*, own_process: bool) -> dict[str, str]:
    """vLLM reads these when it is imported. A forked engine could not use CUDA, because its parent uses it already."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_process else "0",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    }


def engine_options(model: Model, loads: Sequence[Load], device_bytes: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. All prompts of a load run at once if their KV fits, as in the daemon."""
    return {
        "model": model.checkpoint,
        "dtype": model.dtype,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": min(1.0, model.memory / device_bytes),
        "max_model_len": max(load.context + load.tokens for load in loads),
        "max_num_seqs": max(load.prompts for load in loads),
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # otherwise answers have no `metrics`
    }


def measure(llm: Any, sampling: Callable[..., Any], loads: Sequence[Load], prompts: Prompts) -> list[list[Ran]]:
    """Runs each load, and before it a round that warms up. `sampling` makes vLLM's SamplingParams."""
    return [[_round(llm, sampling, load, prompts) for _ in range(load.rounds + 1)][1:] for load in loads]


def _round(llm: Any, sampling: Callable[..., Any], load: Load, prompts: Prompts) -> Ran:
    asked = [{"prompt_token_ids": prompts(load.context)} for _ in range(load.prompts)]
    options = sampling(temperature=0.0, max_tokens=load.tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = llm.generate(asked, options, use_tqdm=False)
    whole = time.perf_counter() - began
    each = [answer.metrics for answer in answers]
    between = [(one.last_token_ts - one.first_token_ts) / max(1, load.tokens - 1) for one in each]
    latest = max(range(len(each)), key=lambda at: each[at].first_token_ts)
    firsts = [one.first_token_latency for one in each]
    return Ran(whole_s=whole, first_s=firsts, between_s=between, step_s=between[latest])


def answer(job: Job) -> Answer:
    os.environ.update(environment(own_process=job.own_process))
    vllm: Any = importlib.import_module(PACKAGE)
    model, seeds = job.model, count()
    try:
        total = torch.cuda.get_device_properties(model.device).total_memory
        llm = vllm.LLM(**engine_options(model, job.loads, total))
        rounds = measure(llm, vllm.SamplingParams, job.loads, lambda tokens: prompt(tokens, model.vocab, next(seeds)))
    except torch.OutOfMemoryError as error:
        return Answer(status=Status.OUT_OF_MEMORY, note=str(error).split(" Of the allocated", 1)[0])
    return Answer(status=Status.MEASURED, rounds=rounds)


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    Path(job.answer).write_bytes(msgspec.json.encode(answer(job)))


if __name__ == "__main__":
    main()
