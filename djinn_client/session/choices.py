"""Several outputs of one prompt. The prompt is computed once, and each output is generated in a fork of its own.

prompt ──► session ──► output 0      which stays the session's
              ├─fork─► output 1
              └─fork─► output 2      forks are closed when all outputs are there
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from djinn_client.errors import DjinnError, InvalidRequest
from djinn_client.protocol import Generate, Generated, Sampling
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from djinn_client.session.calls import SessionCalls

MAX_CHOICES = 128

_SEEDS = 1 << 63


class Outputs(Generated, kw_only=True, tag="outputs"):
    """The first output together with the others. This module makes it of several replies; it never travels."""

    others: list[Generated]

    @property
    def choices(self) -> list[Generated]:
        """The first one is this output, which the session has."""
        return [self, *self.others]


def expect_count(n: int) -> None:
    """Raises InvalidRequest."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n!r}; it must be a whole number from 1 to {MAX_CHOICES}", field="n")


def generate_choices(session: SessionCalls, request: Generate, n: int) -> Steps[Generated]:
    """The first output, with the others in it. A call that fails leaves the session as it was. After an interrupt the
    daemon closes the forks when limits.session_grace is over."""
    prefill = None
    if request.chat is not None or request.text is not None or request.token_ids:
        prefill = yield from session.call_generate(_prefill_of(request))
        if prefill.finish_reason != "length":  # it has stopped at a breakpoint in the prompt
            return prefill
    forks: list[SessionCalls] = []
    try:
        for _ in range(n - 1):
            forks.append((yield from session.fork(None)))
        sessions = [session, *forks]
        requests = [_request_of(request, each.info.id, index) for index, each in enumerate(sessions)]
        outputs = yield from session.generate_beside(forks, requests)
    except Exception:
        yield from _close(forks)
        if prefill is not None:
            with suppress(DjinnError):  # the caller must see the first error
                yield from session.truncate(prefill.usage.session_tokens - prefill.usage.prompt_tokens)
        raise
    except BaseException:
        for fork in forks:
            fork.detach()
        raise
    yield from _close(forks)
    return _whole(outputs, prefill)


def _close(forks: Sequence[SessionCalls]) -> Steps[None]:
    for fork in forks:
        with suppress(DjinnError):
            yield from fork.close()


def _prefill_of(request: Generate) -> Generate:
    """The request that computes the prompt and generates nothing."""
    return msgspec.structs.replace(request, max_tokens=0, sampling=Sampling(), stop=[], logprobs=None, format=None)


def _request_of(request: Generate, session: str, index: int) -> Generate:
    """The request for one output. A chat keeps its messages: the session has all of their tokens. The first output has
    the caller's seed, and the others have the seeds that follow it."""
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) % _SEEDS)
    return msgspec.structs.replace(
        request, session=session, text=None, token_ids=None, prompt_logprobs=None, sampling=sampling
    )


def _whole(outputs: Sequence[Generated], prefill: Generated | None) -> Generated:
    if prefill is not None:
        outputs = [_behind(prefill, output, is_first=index == 0) for index, output in enumerate(outputs)]
    first, *others = outputs
    return Outputs(**msgspec.structs.asdict(first), others=others)


def _behind(prefill: Generated, output: Generated, is_first: bool) -> Generated:
    """The output as one call would have given it. The first output counts the work of computing the prompt."""
    usage, times, before = output.usage, output.timings, prefill.timings
    computed = usage.computed_tokens + (prefill.usage.computed_tokens if is_first else 0)
    return msgspec.structs.replace(
        output,
        prompt_logprobs=prefill.prompt_logprobs,
        token_bytes=prefill.token_bytes | output.token_bytes,
        usage=msgspec.structs.replace(usage, prompt_tokens=prefill.usage.prompt_tokens, computed_tokens=computed),
        timings=msgspec.structs.replace(
            times,
            queued=before.queued,
            first_token=before.total + times.first_token,
            total=before.total + times.total,
        ),
    )
