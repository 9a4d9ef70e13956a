"""The tokens of a pass that get logits, because they are sampled from, returned, or captured."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from djinnd.engine.probes.step_probe import Part
from djinnd.engine.tuning import LOGIT_ROWS
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel


class LogitRows:
    """The tokens of one pass that get logits, all distinct, and the logits of some of them at a time."""

    def __init__(self, model: PagedModel, inputs: StepInputs, part: Part | None, tokens: list[int]) -> None:
        """Fills `logit_rows` of `inputs`. The caller sets `hidden` to the blocks' output."""
        inputs.host["logit_rows"][: len(tokens)] = tokens
        self.hidden: Tensor
        self._model = model
        self._inputs = inputs
        self._part = part
        self._tokens = tokens

    def logits(self, first: int, count: int) -> Tensor:
        """[count, vocab], after edits."""
        probe = None if self._part is None else self._part.probe_behind(self._tokens[first : first + count])
        return self._model.logits(self.hidden, self._inputs.logit_rows(first + count)[first:], probe)

    def pieces(self, first: int, count: int) -> Iterator[Tensor]:
        """Like `logits`, at most LOGIT_ROWS rows at a time."""
        for start in range(first, first + count, LOGIT_ROWS):
            yield self.logits(start, min(LOGIT_ROWS, first + count - start))
