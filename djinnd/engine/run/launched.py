"""A step that the device has got: its rows that sample, and how to read their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.engine.run.batch_inputs import Rows, in_order
from djinnd.engine.run.guessed_rows import of_rows, samples_of
from djinnd.model.sampling.draw import is_penalised
from djinnd.model.sampling.sampler import Queued, Sampled, Sampler
from djinnd.model.sampling.token_masks import RowMasks
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.shapes import Shape


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has got, and that the host has not read."""

    batch: Batch
    sampling: Rows  # rows that sample, in the order of the passes
    is_reordered: bool  # that is not the order of the batch
    queued: Queued | None  # None: no row samples
    shape: Shape | None  # of its pass, if a graph serves all its rows and blocks
    masked: Mapping[int, int] = field(default_factory=dict)  # see RowMasks.guessed

    @property
    def reads_tokens(self) -> bool:
        """True if the step after this one cannot be launched before the host has read this one's tokens."""
        return any(_reads_tokens(row.request) for row in self.batch.rows)

    def hand_over(self, last_tokens: LastTokens | None) -> None:
        """Keeps its tokens on the device for the step that follows, which will overwrite its logits."""
        assert self.queued is not None and last_tokens is not None
        last_tokens.keep(self.queued.asked.values)
        self.queued.logits = None

    def of_batch(self, sampled: Sampled) -> Sampled:
        """`sampled`: the samples of `queued`. → the tokens that count, one for each row that samples, in the order of
        the batch. A row with a right guess has further tokens."""
        if any(row.guess for row in self.sampling):
            sampled = of_rows(sampled, self.sampling, self.masked)
        return in_order(sampled, self.sampling, self.batch.rows) if self.is_reordered else sampled


def queue_samples(sampler: Sampler, logits: Tensor, sampling: Rows, masks: RowMasks | None) -> Queued:
    """Queues the sampling of these rows. A row with a guess has a sample for each of its tokens."""
    if any(row.guess for row in sampling):
        sessions, ahead = samples_of(sampling)
        return sampler.queue(logits, sessions, masks, ahead)
    follows = sampling[0].fed is not None  # and so does every row
    return sampler.queue(logits, [row.session for row in sampling], masks, [1] * len(sampling) if follows else None)


def _reads_tokens(request: Request) -> bool:
    """True if sampling for the request needs the tokens before, or reads more than tokens."""
    return is_penalised(request.sampling) or request.logprobs is not None
