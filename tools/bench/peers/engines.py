"""Other engines in the bench of decoding: vLLM where it is installed, and llama.cpp where its programs are."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec
import torch

from tools.bench.harness.command import say
from tools.bench.peers import llama_bench
from tools.bench.peers.llama_bench import LlamaBench, LlamaFailed
from tools.bench.peers.vllm import Answer, Load, Model, both_ways
from tools.bench.stream.outcome import Status

FIRST_TOKEN_RUNS, STEP_RUNS = 7, 3  # as many as of the daemon


class Decoded(msgspec.Struct, kw_only=True):
    status: Status
    note: str = ""  # the reason why nothing was measured
    first_token_ms: float | None = None
    step_ms: dict[int, float] = {}  # by sessions


def decode(model: Model, gguf: Path | None, work: dict[str, Any]) -> dict[str, Decoded]:
    """First token and steps in each engine, as serving/decode.py defines them. llama.cpp needs a GGUF file."""
    found = {name: of_vllm(answer, work["sessions"]) for name, answer in both_ways(model, loads(work)).items()}
    if gguf is not None:
        say("llama.cpp")
        found[f"llama.cpp with {gguf.name}"] = of_llama(gguf, model.device, work)
    return found


def loads(work: dict[str, Any]) -> list[Load]:
    """The first token of one prompt, then the steps of each number of sessions."""
    context = work["context"]
    first = Load(prompts=1, context=context, tokens=1, rounds=FIRST_TOKEN_RUNS)
    steps = (
        Load(prompts=sessions, context=context, tokens=work["tokens"], rounds=STEP_RUNS)
        for sessions in work["sessions"]
    )
    return [first, *steps]


def of_vllm(answer: Answer, sessions: tuple[int, ...]) -> Decoded:
    """`answer` belongs to `loads`."""
    if answer.status is not Status.MEASURED:
        return Decoded(status=answer.status, note=answer.note)
    first, *steps = answer.rounds
    return Decoded(
        status=Status.MEASURED,
        first_token_ms=statistics.median(ran.whole_s for ran in first) * 1e3,
        step_ms={n: min(ran.step_s for ran in rans) * 1e3 for n, rans in zip(sessions, steps, strict=True)},
    )


def of_llama(gguf: Path, device: str, work: dict[str, Any]) -> Decoded:
    if absent := llama_bench.missing(work["sessions"]):
        return Decoded(status=Status.SKIPPED, note=f"{absent} is not on the PATH")
    llama, context = LlamaBench(gguf, torch.get_num_threads(), device), work["context"]
    try:
        first = llama.first_token(context, FIRST_TOKEN_RUNS)
        steps = {n: llama.step(n, context, work["tokens"], STEP_RUNS) * 1e3 for n in work["sessions"]}
    except LlamaFailed as error:
        return Decoded(status=Status.FAILED, note=str(error))
    return Decoded(status=Status.MEASURED, first_token_ms=first * 1e3, step_ms=steps)
