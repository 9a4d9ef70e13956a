"""One call made in parts, each from the stop of the one before, and their replies joined to one Generated. The daemon
counts each part separately, so each part asks for the remaining tokens, and this module does what spans several parts.
"""

from __future__ import annotations

import time

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import FinishReason, Generate, Generated, Logprobs, Timings, Usage
from djinn_client.protocol.requests import DEFAULT_TOKENS

BROKEN = "\N{REPLACEMENT CHARACTER}"
LATE_S = 1e-3  # stands for a deadline that is over: 0 would mean that there is none


class SplitCall:
    """After the prompt, each part generates one token, because it stops at each of them. So a stop string that began in
    an earlier part ends the call at its last token."""

    def __init__(self, request: Generate) -> None:
        self.ended = False  # by a stop string that no part has seen whole
        self._request = request
        self._began = time.monotonic()
        self._usage = Usage()
        self._queued = self._first_token = self._total = 0.0
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._token_bytes: dict[int, bytes] = {}
        self._last: Generated | None = None

    def next(self) -> Generate:
        if self._last is None:
            return self._request
        request, count = self._request, len(self._tokens)
        most = DEFAULT_TOKENS if request.max_tokens is msgspec.UNSET else request.max_tokens
        return msgspec.structs.replace(
            request,
            text=None,
            token_ids=None,
            resume=True,
            hit=None,
            max_tokens=None if most is None else most - count,
            stop=[] if count else request.stop,
            expected_tokens=max(0, request.expected_tokens - count),
            deadline_s=request.deadline_s and max(LATE_S, request.deadline_s - (time.monotonic() - self._began)),
        )

    def add(self, part: Generated) -> None:
        if self._last is None:
            self._usage, self._queued = part.usage, part.timings.queued
        if part.token_ids and not self._tokens:
            self._first_token = self._total + part.timings.first_token
        self._total += part.timings.total
        first = not self._tokens  # in the first part the daemon has looked for stop strings
        self._tokens += part.token_ids
        self._logprobs += part.logprobs
        self._token_bytes |= part.token_bytes
        self._last = part
        self._append(part.text)
        if not first:
            self._stop(len(self._text) - len(part.text))

    def whole(self) -> Generated:
        """The reply for the whole call. Its times are the daemon's, without the time between the parts."""
        assert self._last is not None
        last = self._last
        reason: FinishReason = "stop" if self.ended else last.finish_reason
        return msgspec.structs.replace(
            last,
            text=self._text,
            token_ids=self._tokens,
            logprobs=self._logprobs,
            token_bytes=self._token_bytes,
            finish_reason=reason,
            hit=None if self.ended else last.hit,
            captured=None if self.ended else last.captured,
            usage=msgspec.structs.replace(
                self._usage, generated_tokens=len(self._tokens), session_tokens=last.usage.session_tokens
            ),
            timings=Timings(queued=self._queued, first_token=self._first_token, total=self._total),
        )

    def _append(self, text: str) -> None:
        """A part that ends in the middle of a character ends with BROKEN. The next part has the whole character."""
        if text and text[0] != BROKEN and not text[0].isascii():
            self._text = self._text.rstrip(BROKEN)
        self._text += text

    def _stop(self, told: int) -> None:
        """Cuts the text before the first stop string that ends behind its first `told` characters. If several end at
        the same character, the longest of them counts."""
        begins = {stop: self._text.find(stop, max(0, told - len(stop) + 1)) for stop in self._request.stop}
        complete = [(begin + len(stop), begin) for stop, begin in begins.items() if begin >= 0]
        if complete:
            self.ended = True
            self._text = self._text[: min(complete)[1]]


def expect_splittable(request: Generate) -> None:
    """Raises InvalidRequest for options that a call cannot have if it may stop at generated tokens."""
    for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
        if getattr(request.sampling, name):
            raise InvalidRequest(
                f"{name} counts what a call has generated, and one that stops at generated tokens for an intervention "
                'is several: leave it out, or intervene with when="prefill"',
                field=name,
            )
