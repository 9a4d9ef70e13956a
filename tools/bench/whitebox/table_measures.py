"""Measurements of table.py on a PagedModel: sessions that stop inside it, continue, and are steered there."""

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

CONTEXT = 32  # tokens of sessions with traced steps
TURNS = 6  # turns of each kind of call
TRACED = 36  # steps of a turn
MORE = 6  # further decode steps, because the trace may begin a little later
TRACE_S = 30.0  # the longest trace
APART = 4  # steps between two calls


def point_behind(depth: int) -> str:
    """The point at the output of the last of `depth` blocks."""
    return f"blocks.{depth - 1}.hook_resid_post"


def share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of equal tokens."""
    same = [a == b for some, others in zip(found, expected, strict=True) for a, b in zip(some, others, strict=True)]
    return sum(same) / len(same)


# --- the same tokens ------------------------------------------------------------------------------------------------


class Generating(NamedTuple):
    """Figures of an uninterrupted run of one prompt."""

    tokens: list[int]
    logprobs: list[float]  # of these tokens
    step: float  # seconds of a step by the daemon's figure


class Stopping(NamedTuple):
    """Figures of a run that stops in each call."""

    tokens: list[int]
    logprobs: list[float]
    hits: list[float]  # seconds from the daemon's receipt of the call to its hit
    resumed: list[float]  # seconds from the hit to the next token, by the client's clock


def uninterrupted(model: PagedModel, prompt: Sequence[int], tokens: int) -> Generating:
    """Runs a prompt that the daemon has not seen, so that all of it is computed in one step, as in `stopped`."""
    with djinn.Session(MODEL, address=model.address) as session:
        out = session.generate(prompt, max_tokens=tokens, logprobs=0, ignore_eos=True)
    step = (out.timings.total - out.timings.first_token) / max(tokens - 1, 1)
    assert out.usage.computed_tokens == len(prompt), out.usage
    return Generating(out.token_ids, [one.token for one in out.logprobs], step)


def stopped(model: PagedModel, depth: int, prompt: Sequence[int], tokens: int) -> Stopping:
    """The prompt and each generated token stop after so many blocks and continue untouched. Seconds are those of the
    generated tokens."""
    found = Stopping([], [], [], [])
    with djinn.Session(MODEL, address=model.address) as session:
        session.breakpoint(layer=depth - 1, when="every")
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
    """A call that joined a step of another session. Seconds of the engine's clock, beyond steps of the same trace
    without a call. (A card's clocks drift by several percent within a minute.)"""

    step: float  # from the step's begin to its end, in device time
    turn: float  # from the step's begin to the begin of the next step but one, with all work of the engine for the call


def beside(model: PagedModel, depth: int) -> dict[str, list[Joined]]:
    """Measures three kinds of calls in a step of another session that decodes. "plain" generates a token, "hit" stops
    after so many blocks, and "capture" generates a token and captures."""
    found: dict[str, list[Joined]] = {}
    with ExitStack() as opened:
        other, plain, stops, captures = (opened.enter_context(model.session(CONTEXT)) for _ in range(4))
        stops.breakpoint(layer=depth - 1, when="every")
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
    """Traces another session that decodes, while this one repeats its call, some steps apart."""
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
    """The steps with a second row whose next step has one row. Empty without an undisturbed step: one without a call in
    it, before it, or after it."""
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
    """Figures of one prompt."""

    logits: Tensor  # float32 [positions, vocab]
    tokens: list[int]


def steered(model: PagedModel, prompt: Sequence[int], tokens: int, depth: int = 0, scale: float = 1.0) -> Steered:
    """Scales all positions after `depth` blocks; 0: no scaling."""
    with djinn.Session(MODEL, address=model.address) as session:
        if depth:
            session.steer(point_behind(depth), op="scale", scale=scale)
        logits = torch.from_numpy(session.forward(prompt)).clone()
        return Steered(logits, session.generate(max_tokens=tokens, ignore_eos=True).token_ids)


def divergence(plain: Tensor, other: Tensor) -> float:
    """Kullback-Leibler divergence of the other distribution from the plain one in nats, the mean over positions. Both
    are logits [positions, vocab]."""
    p, q = (logits.double().log_softmax(dim=-1) for logits in (plain, other))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def change(plain: Tensor, other: Tensor) -> float:
    """The relative change of the logits: the length of the difference, as a share of the plain logits' length."""
    return float(torch.linalg.vector_norm(other - plain) / torch.linalg.vector_norm(plain))


def effect(plain: Sequence[Steered], others: Sequence[Steered]) -> dict[str, float]:
    """The effect of steering, over all prompts."""
    pairs = list(zip(plain, others, strict=True))
    return {
        "differ": 1 - share([one.tokens for one in others], [one.tokens for one in plain]),
        "divergence": sum(divergence(a.logits, b.logits) for a, b in pairs) / len(pairs),
        "change": sum(change(a.logits, b.logits) for a, b in pairs) / len(pairs),
    }


# --- stop, edit, go on ----------------------------------------------------------------------------------------------


class Edited(NamedTuple):
    """Figures of one prompt."""

    seconds: float  # until the last token
    tokens: list[int]


def edited(model: PagedModel, prompt: Sequence[int], tokens: int, depth: int, scale: float) -> Edited:
    """The prompt stops after so many blocks, the client scales the activations, and the session continues."""
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
