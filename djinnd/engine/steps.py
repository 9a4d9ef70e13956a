"""The steps of the engine: the scheduler composes a batch, a model's runner runs it, and the results are sent.

    compose ─► launch ─► (launch the step that follows) ─► idle work ─► read ─► tokens sent, results applied ─► …

A model with a draft gets the draft's guesses between composing and launching.

A step that follows has the same sessions, each with its next token, which is on the device when it is needed. So the
device goes on while the host reads, sends and applies the results of the step before. It is launched only if nothing
is known that has to be done between two steps. Such work can come up while it runs, and then waits for its end: only
work that may overlap with a step is done until then. A session that ends with a step has a row in vain in the step that
follows. The device writes that row's KV behind the session's own, and before any later work that uses these pages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from djinn_client.errors import DjinnError, OutOfMemory, SessionLost
from djinnd import messages
from djinnd.core.batch import LATE, Batch, Row, recomputed
from djinnd.device import Device
from djinnd.engine.drafts.drafts import Drafts
from djinnd.engine.io.channel import ServerChannel, ServerGone
from djinnd.engine.io.idle_work import IdleWork
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.report import Reporter
from djinnd.engine.requests import Requests
from djinnd.engine.run.launched import Launched
from djinnd.engine.run.model_runner import FindMasks, ModelRunner
from djinnd.engine.tracing import Tracer
from djinnd.engine.tuning import AHEAD_FOR_S
from djinnd.model.sampling.sampler import Sampled
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.tuning import STEP

log = logging.getLogger("djinnd.engine")

LOST = (
    "the session's KV was imported from a client and its pages are gone, so it cannot be computed again: import the KV "
    "into a new session, or open a new session with the session's tokens"
)


class Steps:
    """Owns the step that runs. Used by the engine's thread."""

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        runners: Mapping[str, ModelRunner],
        requests: Requests,
        tiers: Tiers,
        reporter: Reporter,
        tracer: Tracer,
        drafts: Drafts,
        idle_work: IdleWork,
        channel: ServerChannel,
        *,
        may_go_on: Callable[[], bool],
    ) -> None:
        """`runners`: by model, a live view. `may_go_on`: True if nothing has to be done between this step and the
        next."""
        self._device = device
        self._scheduler = scheduler
        self._runners = runners
        self._requests = requests
        self._guidance = requests.guidance
        self._tiers = tiers
        self._reporter = reporter
        self._tracer = tracer
        self._drafts = drafts
        self._idle_work = idle_work
        self._channel = channel
        self._may_go_on = may_go_on
        self._ahead: Launched | None = None  # the step that follows the last one that was read
        self._ahead_since = 0.0  # when the last step was launched with nothing before it
        self._began = 0.0  # when the device could begin the step that runs
        self._started: list[messages.Started] = []  # requests with their first row in the current step, not sent yet
        self._unwaited_s = 0.0  # seconds of the steps that the host has not waited for
        self._unwaited: Counter[str] = Counter()  # tokens of these steps, by model
        self._hides_prefill = False  # True if the seconds of these steps say nothing about prefill: see `_waited_for`

    @property
    def is_ahead(self) -> bool:
        """True if a step has been launched that `run` has not read. Only work that may overlap with a step may be done
        then."""
        return self._ahead is not None

    def run(self) -> bool:
        """Runs one batch: the one that was launched ahead, or the next that the scheduler composes. → False if there is
        nothing to run."""
        launched, self._ahead = self._ahead, None
        if launched is not None:
            self._tiers.note_step(launched.batch)
            self._apply(launched.batch, self._read(launched), with_masks=False)
            return True
        self._guidance.turn()
        batch = self._scheduler.next_batch()
        if batch is None:
            self._hides_prefill = bool(self._unwaited)
            return False
        if self._fail_lost(batch) or self._requests.fail_unseen(batch):
            return True
        self._started, self._began = self._requests.note_started(batch), time.monotonic()
        self._ahead_since = self._began
        self._tiers.note_step(batch)
        self._tracer.did("compose")
        batch = self._with_drafts(batch)
        masks = None
        if self._guidance:
            masks = self._guidance.masks
            self._guidance.try_guesses(batch)
        with self._tracer.step(batch):
            launched = self._launch(batch, masks)
            sampled = None if launched is None else self._read(launched)
        self._apply(batch, sampled, with_masks=masks is not None)
        return True

    def _with_drafts(self, batch: Batch) -> Batch:
        """The batch with the guesses of its model's draft. The step's own time begins behind the draft's passes."""
        drafted = self._drafts.added(batch, self._idle_work.run)
        if drafted is not batch:
            self._tracer.did("draft")
            self._began = self._ahead_since = time.monotonic()
        return drafted

    def _launch(self, batch: Batch, masks: FindMasks | None, after: Launched | None = None) -> Launched | None:
        """`after`: the step that the batch follows. → None if the step has failed, and with it its requests."""
        try:
            launched = self._runners[batch.model].launch(batch, self._idle_work.run, masks, after)
        except ServerGone:
            raise
        except Exception as error:
            self._drafts.failed(batch.model)
            self._fail_batch(batch, error)
            return None
        self._drafts.launched(batch.model)
        return launched

    def _follow(self, launched: Launched) -> None:
        """Launches the step that follows, if there is one."""
        lasts = time.monotonic() - self._ahead_since < AHEAD_FOR_S
        model, rows = launched.batch.model, launched.batch.rows
        if lasts and self._runners[model].can_follow(launched) and self._may_go_on():
            batch = None if self._drafts.go_on(model, rows) else self._scheduler.follow(launched.batch)
            if batch is not None:
                self._ahead = self._launch(batch, None, launched)

    def _read(self, launched: Launched) -> Sampled | None:
        """Launches the step that follows, and waits for this one. → None if the step has failed, and with it its
        requests."""
        self._follow(launched)
        try:
            return self._runners[launched.batch.model].finish(launched, self._idle_work.run)
        except ServerGone:
            raise
        except Exception as error:
            self._ahead = None  # it has rows of the same requests, and no others
            self._fail_batch(launched.batch, error)
            return None

    def _apply(self, batch: Batch, sampled: Sampled | None, *, with_masks: bool) -> None:
        """Sends and applies the results of a step; None: it has failed. `with_masks`: some request had a grammar when
        it was launched."""
        if sampled is None:
            return
        runner = self._runners[batch.model]
        scored = runner.scores.take()
        self._note_time(batch)
        sampling = [row for row in batch.rows if row.samples]
        if with_masks:
            sampled = self._guidance.settle(sampling, sampled)
        for message in scored:
            self._channel.send(message)
        self._send_tokens(sampling, sampled)
        waits = bool(sampled.tokens or scored) or any(row.request.logits for row in batch.rows)
        seconds = self._waited_for(batch) if waits else 0.0
        further = {index: [token for token, _ in some] for index, some in sampled.further.items()}
        for request in self._scheduler.complete(batch, self._usable_tokens(sampling, sampled), seconds, further):
            self._requests.finish(request)
        if with_masks:
            self._guidance.hold_back()
        runner.settle()
        self._tracer.did("complete")

    # --- times ------------------------------------------------------------------------------------------------------

    def _note_time(self, batch: Batch) -> None:
        now = time.monotonic()
        self._reporter.steps += 1
        self._unwaited_s += now - self._began
        self._began = now  # of the step that follows, if there is one
        tokens = batch.tokens
        self._unwaited[batch.model] += tokens
        if tokens > len(batch.rows):
            self._hides_prefill = self._hides_prefill or any(row.stage is not None or row.guess for row in batch.rows)
            if again := recomputed(batch):
                self._channel.send(messages.Recomputed(again))

    def _waited_for(self, batch: Batch) -> float:
        """Returns the seconds of this step and of the steps before it that the host did not wait for.

        Also updates the measured prefill speed, with two exceptions. Rows that ran a part of the blocks do not measure
        prefill. If the device was idle in between, the end of the earlier steps was not observed.
        """
        seconds, self._unwaited_s = self._unwaited_s, 0.0
        tells, self._hides_prefill = not self._hides_prefill, False
        tokens = self._unwaited.pop(batch.model)
        if tells and tokens - len(batch.rows) >= STEP.least_chunk and not self._unwaited:
            self._tiers.note_prefill(batch.model, tokens, seconds)
        self._unwaited.clear()
        return seconds

    # --- results ----------------------------------------------------------------------------------------------------

    def send_started(self) -> None:
        """Sends Stepping. As a rule the device still runs the step, so the server has handled the message before the
        first tokens come."""
        if self._started:
            self._channel.send(messages.Stepping(self._started))
            self._started = []

    def _send_tokens(self, sampling: Sequence[Row], sampled: Sampled) -> None:
        """Sends the step's tokens. Unsound and late rows have none, and neither have rows of requests that have
        ended."""
        given = zip(sampling, sampled.tokens, sampled.logprobs, strict=True)
        tokenless = {*sampled.unsound, *sampled.late}
        tokens = [
            messages.Token(row.request.id, token, logprobs)
            for index, (row, token, logprobs) in enumerate(given)
            if index not in tokenless and row.session.request is row.request
        ]
        for index, some in sampled.further.items():
            tokens += [messages.Token(sampling[index].request.id, token, logprobs) for token, logprobs in some]
        self._reporter.generated += len(tokens)
        self.send_started()
        if tokens:
            self._channel.send(messages.Stepped(tokens))

    def _usable_tokens(self, sampling: Sequence[Row], sampled: Sampled) -> Sequence[int | None]:
        """Returns the rows' tokens for the scheduler. A late row has LATE. A row with logits that are not finite has
        None; its call ends there if the session has edits, and fails otherwise."""
        tokens: list[int | None] = [*sampled.tokens]
        for index in sampled.late:
            tokens[index] = LATE
        for index in sampled.unsound:
            tokens[index], row = None, sampling[index]
            if row.session.request is row.request and not row.session.edits:
                dtype = self._runners[row.session.model].model.dtype
                told = (
                    "the model gave logits that are no numbers: its weights hold NaN, or its activations overflow "
                    f"{dtype}; the session is as it was before the call"
                )
                self._requests.fail(row.request, DjinnError(told))
        return tokens

    def _fail_lost(self, batch: Batch) -> bool:
        """Fails requests that would have to recompute imported KV: the session's tokens do not determine it. → True if
        there were any."""
        lost = [row.request for row in batch.rows if row.start < row.session.foreign_tokens]
        for request in lost:
            self._requests.fail(request, SessionLost(LOST))
        return bool(lost)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fails every request of the step. A permanent error of the device is raised again, and the engine exits."""
        log.error("step_failed model=%s rows=%d", batch.model, len(batch.rows), exc_info=error)
        self._device.synchronize()  # raises again if the error is permanent
        self._runners[batch.model].recover()
        told = DjinnError(f"the step failed: {error!r}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            told = OutOfMemory(f"the step ran out of device memory: {error}")
        for row in batch.rows:
            self._requests.fail(row.request, told)
