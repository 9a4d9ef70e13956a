"""The drafts of an engine's models: which model guesses for which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from djinn_client.errors import InvalidRequest
from djinnd.core.batch import Batch, Row
from djinnd.engine.drafts.drafter import Drafter
from djinnd.engine.drafts.head_drafter import HeadDrafter
from djinnd.engine.io.channel import ServerGone
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.messages import Load
from djinnd.model.family.skeleton import Skeleton
from djinnd.scheduler.scheduler import Scheduler

log = logging.getLogger("djinnd.engine")


class Drafts:
    """Used by the engine's thread. The server loads a draft before its targets, and unloads it after them. `runners`:
    by model, a live view."""

    def __init__(self, scheduler: Scheduler, runners: Mapping[str, ModelRunner]) -> None:
        self._scheduler = scheduler
        self._runners = runners
        self._drafters: dict[str, Drafter] = {}  # by target

    def check(self, load: Load, target: Skeleton) -> None:
        """Raises InvalidRequest if the draft that the load names cannot guess for the model."""
        name = load.placing.draft
        if not name:
            return
        draft = self._runners[name]
        for model, is_hybrid in ((load.model, bool(target.stateful)), (name, draft.model.has_states)):
            if is_hybrid:
                told = f"{model} keeps states, which cannot be taken back when a guess is wrong: "
                raise InvalidRequest(f"{told}load {load.model} without a draft", field="speculation", draft=name)
        if draft.hidden is not None and not (target.points.norm and draft.model.skeleton.points.norm):
            told = f"djinnd has not found the final norm of {load.model}, and so no hidden states for its head {name}: "
            raise InvalidRequest(f"{told}load it without a draft", field="speculation", draft=name)
        if draft.model.placement.streams:
            streamed = len(draft.places.streamed)
            raise InvalidRequest(
                f"{name} cannot guess for {load.model}: {streamed} of its blocks stream, so each guessed token would "
                f"wait for the bus; give {name} resident: 1.0 and less KV memory, or take a smaller draft",
                field="speculation",
                draft=name,
                streamed=streamed,
            )

    def attach(self, target: ModelRunner) -> None:
        """The model has been loaded and serves from now on. No effect if it has no draft."""
        name = target.load.placing.draft
        if name:
            builder, draft = self._scheduler.queues[target.name].batch_builder, self._runners[name]
            target.weights.notes.append(f"{name} guesses for it")
            if draft.hidden is None:
                self._drafters[target.name] = Drafter(draft, target.model.vocab, builder)
            else:
                self._drafters[target.name] = HeadDrafter(draft, target, builder)

    def detach(self, model: str) -> None:
        """The model is being unloaded. It guesses for no other."""
        users = [name for name, drafter in self._drafters.items() if drafter.draft.name == model]
        assert not users, f"{model} is unloaded while it guesses for {users}"
        drafter = self._drafters.pop(model, None)
        if drafter is not None:
            drafter.release()

    def close(self, model: str, session_id: str) -> None:
        """A session of the model is closed."""
        if model in self._drafters:
            self._drafters[model].close(session_id)

    def added(self, batch: Batch, meanwhile: Callable[[], bool]) -> Batch:
        """The batch, with guesses of its model's draft. A draft that fails guesses no more; a permanent error of the
        device is raised again."""
        drafter = self._drafters.get(batch.model)
        if drafter is None:
            return batch
        try:
            return drafter.added(batch, meanwhile)
        except ServerGone:
            raise
        except Exception as error:
            self._give_up(batch.model, error)
            return batch

    def launched(self, model: str) -> None:
        """A step of the model has been launched. A head that fails guesses no more, as in `added`."""
        if model in self._drafters:
            try:
                self._drafters[model].launched()
            except Exception as error:
                self._give_up(model, error)

    def failed(self, model: str) -> None:
        """A step of the model could not be launched."""
        if model in self._drafters:
            self._drafters[model].failed()

    def _give_up(self, model: str, error: Exception) -> None:
        drafter = self._drafters.pop(model)
        log.error("draft_failed model=%s draft=%s", model, drafter.draft.name, exc_info=error)
        drafter.draft.device.synchronize()  # raises again if the error is permanent
        drafter.draft.recover()
        drafter.release()

    def check_integrity(self) -> None:
        """Asserts that the drafts know and hold pages only for sessions that are open."""
        for model, drafter in self._drafters.items():
            stray = drafter.sessions - self._scheduler.queues[model].sessions.keys()
            assert not stray, f"the draft of {model} knows the closed sessions {sorted(stray)}"

    def go_on(self, model: str, rows: Sequence[Row]) -> bool:
        """See Drafter.goes_on."""
        return model in self._drafters and self._drafters[model].goes_on(rows)
