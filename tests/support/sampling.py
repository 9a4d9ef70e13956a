"""Sessions that want a token, and the sampler's arithmetic in plain Python."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import count

from djinn_client.protocol import Sampling
from djinnd.core.request import Request
from djinnd.core.session import Session

_ids = count()
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def wanting(
    sampling: Sampling,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    logprobs: int | None = None,
    stop_tokens: Collection[int] = (),
) -> Session:
    """A session with a request that has generated `output` so far."""
    number = next(_ids)
    request = Request(
        number,
        first=0,
        prompt_end=len(prompt),
        max_tokens=64,
        sampling=sampling,
        stop_tokens=frozenset(stop_tokens),
        logprobs=logprobs,
    )
    return Session(str(number), "model", tenant=0, priority="batch", tokens=[*prompt, *output], request=request)


def splitmix64(state: int, n: int) -> int:
    """The n-th number, from 1, of the stream that starts at `state`."""
    z = (state + n * _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def gumbel(seed: int, position: int, index: int) -> float:
    key = splitmix64(splitmix64(seed, 1), position + 1)
    bits = splitmix64(key, index + 1) ^ (1 << 63)  # in the order of signed integers
    u = ((bits >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


def reference(logits: Sequence[float], session: Session) -> int:
    """The token that the session's request must get."""
    request = session.request
    assert request is not None
    sampling = request.sampling
    values = _penalised(logits, session)
    if sampling.temperature == 0:
        return values.index(max(values))
    lowest = _lowest(values, sampling)
    scores = {
        index: value + sampling.temperature * gumbel(sampling.seed or 0, len(session.tokens), index)
        for index, value in enumerate(values)
        if value >= lowest
    }
    return max(scores, key=scores.__getitem__)


def _penalised(logits: Sequence[float], session: Session) -> list[float]:
    request = session.request
    assert request is not None
    values, penalty = list(logits), request.sampling.repetition_penalty
    for token, bias in request.sampling.logit_bias.items():
        values[token] += bias
    if len(session.tokens) < request.prompt_end + request.sampling.min_tokens:
        for token in request.stop_tokens:
            values[token] = -math.inf
    for token in set(session.tokens):
        values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
    output = session.tokens[request.prompt_end :]
    for token in set(output):
        values[token] -= request.sampling.presence_penalty + request.sampling.frequency_penalty * output.count(token)
    return values


def _lowest(values: Sequence[float], sampling: Sampling) -> float:
    """Each limit in turn keeps the values at or above a threshold."""
    ranked = sorted(values, reverse=True)[: sampling.top_k or None]
    weights = [math.exp((value - ranked[0]) / sampling.temperature) for value in ranked]
    kept = ranked[0]
    for rank, value in enumerate(ranked):
        if sum(weights[:rank]) < sampling.top_p * sum(weights) or sampling.top_p == 1:
            kept = value
    if not sampling.top_k and sampling.top_p == 1:
        kept = -math.inf
    if sampling.min_p:
        kept = max(kept, ranked[0] + sampling.temperature * math.log(sampling.min_p))
    return kept
