"""The passes of a draft over its target's sessions: the first one runs what is new, the others a guessed token each.

Sampled tokens go from one pass to the next on the device. The host waits once, for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from djinnd.core.batch import Row
from djinnd.core.drafted import Drafted
from djinnd.core.session import Session
from djinnd.engine.drafts.choice import Choice
from djinnd.engine.drafts.draft_pages import DraftPages
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.model.copies.pinned_io import ResultReader
from djinnd.model.sampling.sampler import Sampler
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.shapes import Shape


class DraftPasses:
    """`vocab`: how many tokens the target knows. The draft guesses no others."""

    def __init__(self, draft: ModelRunner, vocab: int, pages: DraftPages) -> None:
        self._draft = draft
        self._vocab = vocab
        device = draft.device
        self._last = draft.last_tokens or LastTokens(draft.max_rows, device.torch_device)
        with device.computing():
            self._sampler = Sampler(vocab, device.torch_device)
            self._nothing = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        self._reader = ResultReader()
        self._shadows: dict[str, Session] = {}  # by session: the same text as a session of the draft
        self._passes = draft.passes.over(pages, self._last)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], choice: Choice, meanwhile: Callable[[], bool]) -> list[list[int]]:
        """→ for each of the choice's guesses, as many tokens as there are passes, or those before logits that are no
        numbers. Waits for the device also if there is no guess: the time that it took is measured."""
        draft, count, passes = self._draft, len(choice.guesses), choice.passes
        guessing = [rows[candidate.row] for candidate, _ in choice.guesses]
        first = [self._new_tokens(rows[c.row], c.drafted, c.drafted.missing, True) for c, _ in choice.guesses]
        first += [self._new_tokens(rows[c.row], c.drafted, tokens, False) for c, tokens in choice.behind]
        sessions, chosen = [row.session for row in guessing], list[Tensor]()
        with draft.device.computing():
            draft.passes.wait()
            draft.pages.zero_stale()
            self._before_first(choice)
            logits, shapes = self._pass(first)
            for ahead in range(passes):
                assert logits is not None
                queued = self._sampler.queue(self._fitted(logits), sessions, None, [ahead] * count)
                chosen.append(queued.asked.values)
                if ahead + 1 < passes:
                    self._last.keep(chosen[-1])
                    self._before_further()
                    logits, more = self._pass(self._guessed_tokens(choice, guessing, ahead))
                    shapes |= more
            values = self._reader.read(self._reader.ask(torch.cat(chosen) if chosen else self._nothing), meanwhile)
        self._passes.inputs = None  # the device has read them
        for shape in shapes:
            draft.graphs.capture(shape)
        return [_sound(values[at : passes * count : count]) for at in range(count)]

    def _pass(self, rows: Sequence[Row]) -> tuple[Tensor | None, set[Shape]]:
        """→ the logits of rows that sample, and the shape of the graph that could replay it."""
        self._passes.ran = None
        _, logits = self._passes.run(rows, None, self._draft.graphs.current)
        ran = self._passes.ran
        return logits, set() if ran is None else {ran}

    def forget(self, session_id: str) -> None:
        shadow = self._shadows.pop(session_id, None)
        if shadow is not None and shadow.request is not None:
            self._sampler.forget(shadow.request)

    def _before_first(self, choice: Choice) -> None:
        """Called before the first pass: a head needs more than tokens."""

    def _before_further(self) -> None:
        """Called before each further pass."""

    def _new_tokens(self, row: Row, drafted: Drafted, count: int, samples: bool) -> Row:
        """A row of the draft: the session's next tokens that have no KV in the draft."""
        shadow = self._shadow(row, drafted)
        return Row(
            shadow, row.request, drafted.computed - drafted.first, count, 0, self._draft.model.num_blocks, samples
        )

    def _guessed_tokens(self, choice: Choice, guessing: Sequence[Row], ahead: int) -> list[Row]:
        """Rows of the draft: a token of each guess, `ahead` tokens behind the session's text."""
        found = []
        for fed, (row, (candidate, _)) in enumerate(zip(guessing, choice.guesses, strict=True)):
            start = row.end - candidate.drafted.first + ahead
            shadow = self._shadow(row, candidate.drafted)
            found.append(Row(shadow, row.request, start, 1, 0, self._draft.model.num_blocks, True, fed=fed))
        return found

    def _shadow(self, row: Row, drafted: Drafted) -> Session:
        """The session as the draft's own: the text from `drafted.first` on."""
        session = row.session
        shadow = self._shadows.get(session.id)
        if shadow is None or shadow.tokens is not session.tokens:
            shadow = Session(session.id, self._draft.name, session.tenant, session.priority, session.tokens)
            self._shadows[session.id] = shadow
        self._take_request(shadow, row)
        return shadow

    def _take_request(self, shadow: Session, row: Row) -> None:
        if shadow.request is not row.request:
            if shadow.request is not None:
                self._sampler.forget(shadow.request)
            shadow.request = row.request

    def _fitted(self, logits: Tensor) -> Tensor:
        """The logits of the target's tokens. The draft may have rows of its head for more, or for fewer."""
        width = logits.shape[1]
        if width >= self._vocab:
            return logits[:, : self._vocab]
        fitted = logits.new_full((len(logits), self._vocab), -math.inf)
        fitted[:, :width] = logits
        return fitted


def _sound(tokens: list[int]) -> list[int]:
    """The tokens before the first that is -1: its logits were no numbers."""
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens
