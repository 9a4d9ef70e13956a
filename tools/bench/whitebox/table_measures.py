"""What table.py measures of a PagedModel: sessions that stop inside of it, go on, and are steered there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

import djinn_client as djinn
from djinn_client.protocol import Span
from tools.bench.harness.paged_model import MODEL, PagedModel

CONTEXT = 32  # tokens of those whose steps are traced
TURNS = 6  # that each kind of call has
TRACED = 36  # steps of a turn
MORE = 6  # that decode: the trace may begin a little later
TRACE_S = 30.0  # in which they have been run
APART = 4  # steps between two calls


def point_behind(depth: int) -> str:
    """What has come when so many blocks have run."""
    return f"blocks.{depth - 1}.hook_resid_post"


def share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Of all tokens, those that are the same."""
    same = [a == b for some, others in zip(found, expected, strict=True) for a, b in zip(some, others, strict=True)]
    return sum(same) / len(same)


# --- the same tokens ------------------------------------------------------------------------------------------------


class Generating(NamedTuple):
    """Of one prompt."""

    tokens: list[int]
    logprobs: list[float]  # of these tokens
    step: float  # seconds, as the daemon says


class Stopping(NamedTuple):
    """The same, where each call has stopped."""

    tokens: list[int]
    logprobs: list[float]
    hits: list[float]  # seconds from the daemon's receipt of the call to its hit
    resumed: list[float]  # seconds on the client's clock, from there to the next token


def uninterrupted(model: PagedModel, prompt: Sequence[int], tokens: int) -> Generating:
    """Of a prompt that nobody has seen: all of it is computed in one step, as where it stops."""
    with djinn.Session(MODEL, address=model.address) as session:
        out = session.generate(prompt, max_tokens=tokens, logprobs=0, ignore_eos=True)
    step = (out.timings.total - out.timings.first_token) / max(tokens - 1, 1)
    assert out.usage.computed_tokens == len(prompt), out.usage
    return Generating(out.token_ids, [one.token for one in out.logprobs], step)


def stopped(model: PagedModel, depth: int, prompt: Sequence[int], tokens: int) -> Stopping:
    """The prompt stops behind so many blocks, and each generated token; nobody looks at what is there, and it goes on.
    The seconds are those of the generated ones."""
    found = Stopping([], [], [], [])
    with djinn.Session(MODEL, address=model.address) as session:
        session.breakpoint(layer=depth - 1)
        for number in range(tokens):
            hit = session.run(None if number else prompt, max_tokens=1, ignore_eos=True)
            assert isinstance(hit, djinn.Hit) and hit.info.block == depth, hit
            assert len(hit.positions) == (1 if number else len(prompt)), hit
            began = time.perf_counter()
            out = session.resume(max_tokens=1, logprobs=0, ignore_eos=True)
            seconds = time.perf_counter() - began
            assert isinstance(out, djinn.Generated), out
            found.tokens.extend(out.token_ids)
            found.logprobs.extend(one.token for one in out.logprobs)
            if number:
                found.hits.append(hit.generated.timings.total)
                found.resumed.append(seconds)
    return found


# --- on the path of others' steps -----------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A call that has joined a step of others: seconds on the engine's clock, beyond those that such steps take in the
    same trace where nobody joins. (A card's clocks wander by several percent within a minute.)"""

    step: float  # from the step's begin to its end, as the device sees it
    turn: float  # from its begin until the next step but one begins: with all that the engine does for the call


def beside(model: PagedModel, depth: int) -> dict[str, list[Joined]]:
    """By what the call of a session does in a step of another one that decodes: it gives a token ("plain"), stops
    behind so many blocks ("hit"), or gives a token and what had come there ("capture")."""
    found: dict[str, list[Joined]] = {}
    with ExitStack() as opened:
        other, plain, stops, captures = (opened.enter_context(model.session(CONTEXT)) for _ in range(4))
        stops.breakpoint(layer=depth - 1)
        capture = captures.capture([point_behind(depth)])
        ways: dict[str, tuple[djinn.Session, Callable[[], object]]] = {
            "plain": (plain, lambda: plain.generate(max_tokens=1, ignore_eos=True)),
            "hit": (stops, lambda: stops.run(max_tokens=1, ignore_eos=True)),
            "capture": (captures, lambda: capture.run(max_tokens=1, ignore_eos=True)),
        }
        for _ in range(TURNS):
            for way, (session, call) in ways.items():
                found.setdefault(way, []).extend(joined(_steps_beside(model, other, session, call)))
    return found


def _steps_beside(
    model: PagedModel, other: djinn.Session, session: djinn.Session, call: Callable[[], object]
) -> list[Span]:
    """The trace of another session that decodes, while this one makes its call again and again, some steps apart."""
    times = other.generate(max_tokens=APART + 1, ignore_eos=True).timings
    with djinn.Client(model.address) as client, ThreadPoolExecutor(2) as threads:
        client.ping()
        trace = threads.submit(client.trace, steps=TRACED, seconds=TRACE_S)
        decoding = threads.submit(other.generate, max_tokens=TRACED + MORE, ignore_eos=True)
        while not trace.done():
            call()
            session.truncate(CONTEXT)
            time.sleep(times.total - times.first_token)
        decoding.result()
    other.truncate(CONTEXT)
    return trace.result().spans


def joined(spans: Sequence[Span]) -> list[Joined]:
    """The steps that a second row has joined, where none has joined the next one. None, where no step is undisturbed:
    without a call in it, before it, or behind it."""
    steps = [span for span in spans if span.track == "step"]
    rows = [span.args["rows"] for span in steps]
    alone = [index for index in range(1, len(steps) - 1) if rows[index - 1 : index + 2] == [1, 1, 1]]
    if not alone:
        return []
    step_us = statistics.median(steps[index].duration_us for index in alone)
    turn_us = statistics.median(steps[index + 1].start_us - steps[index].start_us for index in alone) * 2
    return [
        Joined((step.duration_us - step_us) / 1e6, (steps[index + 2].start_us - step.start_us - turn_us) / 1e6)
        for index, step in enumerate(steps[:-2])
        if rows[index : index + 2] == [2, 1]
    ]


# --- steered --------------------------------------------------------------------------------------------------------


class Steered(NamedTuple):
    """Of one prompt."""

    logits: Tensor  # float32 [positions, vocab]
    tokens: list[int]


def steered(model: PagedModel, prompt: Sequence[int], tokens: int, depth: int = 0, scale: float = 1.0) -> Steered:
    """All positions are scaled behind so many blocks; 0: nowhere."""
    with djinn.Session(MODEL, address=model.address) as session:
        if depth:
            session.steer(point_behind(depth), op="scale", scale=scale)
        logits = torch.from_numpy(session.forward(prompt)).clone()
        return Steered(logits, session.generate(max_tokens=tokens, ignore_eos=True).token_ids)


def divergence(plain: Tensor, other: Tensor) -> float:
    """Kullback-Leibler, of the distribution that the other logits are of from the plain ones': nats, the mean over
    positions. Both are [positions, vocab]."""
    p, q = (logits.double().log_softmax(dim=-1) for logits in (plain, other))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def change(plain: Tensor, other: Tensor) -> float:
    """By how much the logits differ: the length of the difference, as a share of the plain ones'."""
    return float(torch.linalg.vector_norm(other - plain) / torch.linalg.vector_norm(plain))


def effect(plain: Sequence[Steered], others: Sequence[Steered]) -> dict[str, float]:
    """Of steering, over all prompts."""
    pairs = list(zip(plain, others, strict=True))
    return {
        "differ": 1 - share([one.tokens for one in others], [one.tokens for one in plain]),
        "divergence": sum(divergence(a.logits, b.logits) for a, b in pairs) / len(pairs),
        "change": sum(change(a.logits, b.logits) for a, b in pairs) / len(pairs),
    }


# --- stop, edit, go on ----------------------------------------------------------------------------------------------


class Edited(NamedTuple):
    """Of one prompt."""

    seconds: float  # to the last token
    tokens: list[int]


def edited(model: PagedModel, prompt: Sequence[int], tokens: int, depth: int, scale: float) -> Edited:
    """The prompt stops behind so many blocks, the client scales what is there, and the session goes on."""
    with djinn.Session(MODEL, address=model.address) as session:
        session.breakpoint(layer=depth - 1, when="prefill")
        began = time.perf_counter()
        hit = session.run(prompt, max_tokens=1)
        assert isinstance(hit, djinn.Hit), hit
        hit.activation *= scale
        out = session.resume(max_tokens=tokens, ignore_eos=True)
        seconds = time.perf_counter() - began
        assert isinstance(out, djinn.Generated), out
        return Edited(seconds, out.token_ids)
