"""djinnd as a contender: a private daemon with one model, called by ordinary sessions."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

import djinn_client as djinn
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions, step_seconds
from tools.bench.stream.experiment import Shape, size
from tools.bench.stream.outcome import Found, Outcome, Status
from tools.bench.stream.sharer import Sharing, hand_over
from tools.private_daemon import DaemonFailed, PrivateDaemon

MODEL = "streamed"
ALONE = 4  # last tokens of the prompt that run one by one
WARM_UPS = 2  # first tokens that do not count
PAUSE_S = 0.2  # before each first token, so that a ring fills and the daemon is quiet
WARM_UP_TOKENS = 16  # of each number of sessions, for compiling and capturing
PINNING_S = 60.0  # the longest wait for pinned host pages; steps are slower until then
SOON_S = 2.0  # host pages appear within this time, if there are any


class Serving(NamedTuple):
    """A daemon's configuration, and the work of its sessions."""

    device: str
    memory: str
    settings: dict[str, Any]  # the model's, `path` among them
    vocab: int
    prompt: int  # tokens
    tokens: int
    sessions: dict[int, int]  # sessions that decode → tokens that each has before
    runs: int
    first_token: bool
    shared: Shape | None = None  # a client hands this model over; `settings` have no `path` then

    @property
    def config(self) -> str:
        models = {MODEL: self.settings} if self.shared is None else {}
        return yaml.safe_dump({"device": self.device, "memory": self.memory, "models": models}, sort_keys=False)


class Served(NamedTuple):
    outcome: Outcome
    logits: npt.NDArray[np.float32] | None = None  # of the prompt: [tokens, vocab]
    info: djinn.ModelInfo | None = None


def measure(serving: Serving, say: Callable[[str], None], ready: Callable[[], None] = lambda: None) -> Served:
    """Measures a daemon. A daemon that fails is a result. If it fails only when it stops, its figures still count.

    `ready` is called when the daemon is the only process with device memory.
    """
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
        daemon = PrivateDaemon(Path(folder), serving.config)
        found = Served(Outcome(status=Status.FAILED))
        try:
            with daemon:
                daemon.wait_until_ready()
                info = _loaded(serving, daemon.address)
                ready()
                found = _measure(serving, daemon.address, info)
        except djinn.OutOfMemory as error:
            found = Served(Outcome(status=Status.OUT_OF_MEMORY, note=error.message))
        except djinn.DjinnError as error:
            found = Served(Outcome(status=Status.FAILED, note=error.message))
            say(daemon.last_words())
        except DaemonFailed as error:
            found.outcome.note = str(error)
            say(daemon.last_words())
        return found


def _loaded(serving: Serving, address: str) -> djinn.ModelInfo:
    if serving.shared is None:
        return djinn.load(MODEL, address=address)
    sharing = Sharing(
        address=address,
        name=MODEL,
        shape=serving.shared,
        device=serving.device,
        kv_bytes=size(str(serving.settings.get("kv", 0))),
        placing={name: serving.settings[name] for name in ("resident", "ring_gb", "slots") if name in serving.settings}
        | {"packing": serving.settings.get("packing") != "off"},
    )
    hand_over(sharing)
    with djinn.Client(address) as client:
        return next(info for info in client.models() if info.name == MODEL)


def _await_pages(address: str) -> None:
    """Waits until the host's pages are pinned."""
    began = time.monotonic()
    with djinn.Client(address) as client:
        while (waited := time.monotonic() - began) < PINNING_S:
            info = next(info for info in client.models() if info.name == MODEL)
            if info.host_pages_pinned == info.host_pages and (info.host_pages or waited > SOON_S):
                break
            time.sleep(PAUSE_S)


def _measure(serving: Serving, address: str, info: djinn.ModelInfo) -> Served:
    _await_pages(address)
    logits = prompt_logits(serving, address)
    first = first_token_s(serving, address) if serving.first_token else []
    steps = {n: asyncio.run(step_s(serving, address, n)) for n in serving.sessions}
    found = Found(
        first_token_s=first,
        step_s=steps,
        streamed_bytes=info.streamed_bytes,
        resident_blocks=info.blocks_plain,
        packed_blocks=info.blocks_packed,
        streamed_blocks=info.blocks_streamed,
    )
    return Served(Outcome(status=Status.MEASURED, found=found), logits, info)


def prompt_logits(serving: Serving, address: str) -> npt.NDArray[np.float32]:
    """The prompt's logits, float32 [tokens, vocab]. The last tokens come one by one, through the code of decode."""
    tokens = prompt(serving.prompt, serving.vocab, 0)
    with djinn.Session(MODEL, address=address) as session:
        parts = [session.forward(tokens[:-ALONE]), *(session.forward([token]) for token in tokens[-ALONE:])]
        return np.concatenate(parts)


def first_token_s(serving: Serving, address: str) -> list[float]:
    """Seconds of fresh sessions, one after another, each with a new prompt. The first ones do not count: one runs a
    step of that shape for the first time, and the next waits for its capture."""
    times = []
    for run in range(WARM_UPS + serving.runs):
        time.sleep(PAUSE_S)
        with djinn.Session(MODEL, address=address) as session:
            began = time.perf_counter()
            session.generate(prompt(serving.prompt, serving.vocab, 1 + run), max_tokens=1, ignore_eos=True)
            times.append(time.perf_counter() - began)
    return times[WARM_UPS:]


async def step_s(serving: Serving, address: str, sessions: int) -> list[float]:
    """Seconds of a step while so many sessions decode, from the same length in each run."""
    context = serving.sessions[sessions]
    async with open_sessions(address, MODEL, sessions) as opened:
        first = (
            s.generate(prompt(context, serving.vocab, i), max_tokens=1, ignore_eos=True) for i, s in enumerate(opened)
        )
        await asyncio.gather(*first)
        await _run(opened, min(WARM_UP_TOKENS, serving.tokens), context)
        return [await _run(opened, serving.tokens, context) for _ in range(serving.runs)]


async def _run(sessions: Sequence[djinn.AsyncSession], tokens: int, context: int) -> float:
    for session in sessions:
        await session.truncate(context)
    return await step_seconds(sessions, tokens)
