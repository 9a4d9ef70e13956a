"""The passes of a head over its target's sessions. Each token of a pass needs the hidden state before it.

first pass        tokens 2 9       hidden states of the target, before 2 and before 9
further passes           4         the head's own result behind 9
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from djinnd.core.batch import Row
from djinnd.core.drafted import Drafted
from djinnd.core.headed import Headed
from djinnd.core.session import Session
from djinnd.engine.drafts.choice import Choice
from djinnd.engine.drafts.draft_pages import DraftPages
from djinnd.engine.drafts.draft_passes import DraftPasses
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.model.copies.upload import upload


class HeadPasses(DraftPasses):
    """The head numbers its positions from the beginning of the text that it knows. Only the distances of tokens count
    in attention."""

    def __init__(self, head: ModelRunner, vocab: int, pages: DraftPages) -> None:
        super().__init__(head, vocab, pages)
        assert head.hidden is not None
        self._hidden = head.hidden
        self._norm = head.model.adapter.model.get_submodule(head.model.skeleton.points.norm)
        self._passes.behind = self._note_results
        self._guesses = 0  # the first rows of the next pass: a further pass needs their results
        self._results: Tensor | None = None
        self._firsts: dict[str, int] = {}  # by session: the position at which the text of its shadow begins

    @torch.inference_mode()
    def read(self, parts: Sequence[tuple[Row, Headed, int]]) -> None:
        """Queues a pass over the next tokens of sessions, for their KV. Each with the target's row, and a count."""
        head, self._guesses = self._draft, 0
        rows = [self._new_tokens(row, headed, count, False) for row, headed, count in parts]
        with head.device.computing():
            head.passes.wait()
            head.pages.zero_stale()
            self._hidden.feed([place for _, headed, count in parts for place in headed.kept[:count]])
            self._pass(rows)

    def forget(self, session_id: str) -> None:
        super().forget(session_id)
        self._firsts.pop(session_id, None)

    def _before_first(self, choice: Choice) -> None:
        counts = [(c.drafted, c.drafted.missing) for c, _ in choice.guesses]
        counts += [(candidate.drafted, tokens) for candidate, tokens in choice.behind]
        places: list[int] = []
        for drafted, count in counts:
            assert isinstance(drafted, Headed) and count <= len(drafted.kept)
            places += drafted.kept[:count]
        self._hidden.feed(places)
        self._guesses = len(choice.guesses) if choice.passes > 1 else 0

    def _before_further(self) -> None:
        assert self._results is not None
        self._hidden.feed_back(self._results)

    def _note_results(self, rows: Sequence[Row], hidden: Tensor) -> None:
        """Keeps the results of a pass for the next one: of the last tokens of its guessing rows, after the norm."""
        if not self._guesses:
            return
        ends = list(accumulate(row.count for row in rows[: self._guesses]))
        if ends[-1] == self._guesses:
            chosen = hidden[0, : self._guesses]
        else:
            chosen = hidden[0].index_select(0, upload([end - 1 for end in ends], torch.int64, hidden.device))
        self._results = self._norm(chosen)

    def _shadow(self, row: Row, drafted: Drafted) -> Session:
        session, first = row.session, drafted.first
        shadow = self._shadows.get(session.id)
        if shadow is None:
            shadow = Session(session.id, self._draft.name, session.tenant, session.priority)
            self._shadows[session.id] = shadow
        known = drafted.computed - first if self._firsts.get(session.id) == first else 0
        self._firsts[session.id] = first
        del shadow.tokens[known:]
        shadow.tokens += session.tokens[first + len(shadow.tokens) :]
        self._take_request(shadow, row)
        return shadow
