"""llama.cpp's own benchmarks as a peer, for the model of a GGUF file.

`llama-bench` measures prompts and one sequence, and `llama-batched-bench` several sequences. Their tokens are random,
and nothing is sampled. Each measurement has a process of its own, which loads the model and warms up by itself.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

ONE, SEVERAL = "llama-bench", "llama-batched-bench"


class LlamaFailed(Exception):
    """One of llama.cpp's programs has ended with an error."""


class Test(msgspec.Struct):
    """An element of llama-bench's JSON."""

    samples_ns: list[int]  # of the whole prompt, or of all generated tokens; one for each repetition


class Batch(msgspec.Struct):
    """A line of llama-batched-bench's JSON."""

    tg: int  # tokens that each sequence has generated
    t_tg: float  # seconds of that


class LlamaBench:
    """A GGUF file in llama.cpp, on `device` as the daemon names it: "cpu", or a GPU for all blocks."""

    def __init__(self, gguf: Path, threads: int, device: str) -> None:
        place = ["-dev", "none"] if device == "cpu" else ["-ngl", "99"]
        self._common = ["-m", str(gguf), "-t", str(threads), *place]

    def first_token(self, tokens: int, runs: int = 1) -> float:
        """Seconds of a prompt: the median of the runs."""
        return statistics.median(self._samples(prompt_arguments(tokens, runs)))

    def step(self, sessions: int, context: int, tokens: int, runs: int = 1) -> float:
        """Seconds between tokens of so many sequences after their prompts: the fastest of the runs."""
        if sessions == 1:
            return min(self._samples(decode_arguments(context, tokens, runs))) / (tokens - 1)
        said = _output(SEVERAL, [*self._common, *batch_arguments(sessions, context, tokens, runs)])
        return min(steps(said))

    def _samples(self, arguments: Sequence[str]) -> list[float]:
        return samples(_output(ONE, [*self._common, *arguments]))


def missing(sessions: Sequence[int]) -> str | None:
    """The first program that these numbers of sessions need and that is not on the PATH."""
    needed = [ONE, SEVERAL] if max(sessions) > 1 else [ONE]
    return next((program for program in needed if shutil.which(program) is None), None)


def prompt_arguments(tokens: int, runs: int) -> list[str]:
    return ["-p", str(tokens), "-n", "0", "-r", str(runs), "-o", "json"]


def decode_arguments(context: int, tokens: int, runs: int) -> list[str]:
    """The first of the tokens belongs to the prompt, which is computed before the clock starts (`-d`)."""
    return ["-p", "0", "-n", str(tokens - 1), "-d", str(context), "-r", str(runs), "-o", "json"]


def batch_arguments(sessions: int, context: int, tokens: int, runs: int) -> list[str]:
    """A number of sequences that is named several times is measured as often."""
    load = ["-npp", str(context), "-ntg", str(tokens - 1), "-npl", ",".join([str(sessions)] * runs)]
    return [*load, "-c", str(sessions * (context + tokens)), "--output-format", "jsonl"]


def samples(said: str) -> list[float]:
    """Seconds of each repetition of llama-bench's only test."""
    (test,) = msgspec.json.decode(said, type=list[Test])
    return [ns / 1e9 for ns in test.samples_ns]


def steps(said: str) -> list[float]:
    """Seconds of a step in each line of llama-batched-bench. Other lines are its log."""
    lines = [line for line in said.splitlines() if line.startswith("{")]
    batches = [msgspec.json.decode(line, type=Batch) for line in lines]
    return [batch.t_tg / batch.tg for batch in batches]


def _output(program: str, arguments: Sequence[str]) -> str:
    """Runs a program to its end. → its standard output. Raises LlamaFailed with the last line that it wrote."""
    ended = subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return ended.stdout
    lines = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()] or ["without a word"]
    raise LlamaFailed(f"{program} ended with code {ended.returncode}: {lines[-1]}")
