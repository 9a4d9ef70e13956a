"""The drafts of models: a model with a draft is loaded after it, and the draft stays as long as the model needs it.

    draft    loading ─► ready ──────────── refuses to be unloaded, does not sleep ──────────► may leave
    target             loading ─► ready ─────────────────────► asleep, or unloaded

Both models are of the configuration. The daemon reads no other tokenizers itself, and no user can keep another's model
loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from djinn_client.errors import InvalidRequest, ModelNotFound, ModelRejected
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.models.model import ServedModel
from djinnd.server.models.text import ModelText
from djinnd.text.vocabulary import differing_tokens


class DraftMoved(Exception):
    """The draft is not on the engine on which its target is to be loaded: that one, or this one, has been lost."""


class DraftModels:
    """`models` iterates over all known models. `load` begins a load."""

    def __init__(self, models: Iterable[ServedModel], load: Callable[[ServedModel], None]) -> None:
        self._models = models
        self._load = load

    async def ready(self, model: ServedModel, text: ModelText) -> None:
        """Loads the model's draft, if it has one and the draft is not ready. `text`: of the model, which is being
        loaded. Raises InvalidRequest, ModelNotFound, and the errors of the draft's load."""
        if not model.placing.draft:
            return
        draft = self._draft_of(model)
        while draft.engine is None:
            if draft.state == "set aside":
                raise ModelRejected(draft.error)
            if draft.changing is None:
                self._load(draft)
            await draft.join()
        assert draft.text is not None
        await self._compare(model, text, draft.name, draft.text)

    def expect_on(self, engine: EngineClient, model: ServedModel) -> None:
        """Raises DraftMoved if the model has a draft that is not on this engine."""
        if model.placing.draft and self._draft_of(model).engine is not engine:
            raise DraftMoved

    def is_draft(self, model: ServedModel) -> bool:
        """True if the model guesses for another one, or is to do so by the configuration."""
        return any(model.name in (each.placing.draft, each.source.placing.draft) for each in self._models)

    def is_needed(self, model: ServedModel) -> bool:
        """True while another model has it as its draft."""
        return bool(self._targets(model))

    def expect_unused(self, model: ServedModel) -> None:
        """Raises InvalidRequest while another model has it as its draft."""
        if targets := self._targets(model):
            told = f"{model.name} guesses for {', '.join(targets)}: unload {targets[0]} first"
            raise InvalidRequest(told, targets=targets)

    def _targets(self, model: ServedModel) -> list[str]:
        return [
            each.name
            for each in self._models
            if each.placing.draft == model.name and each.state in ("loading", "ready")
        ]

    def _draft_of(self, model: ServedModel) -> ServedModel:
        name = model.placing.draft
        draft = next((each for each in self._models if each.name == name and each.is_configured), None)
        if draft is None:
            raise ModelNotFound(f"{model.name} cannot have the draft {name}: the configuration has no model {name}")
        if not model.is_configured:
            told = f"{model.name} cannot have a draft: only a model of the configuration can"
        elif draft is model:
            told = f"{name} cannot be its own draft: name a smaller model with the same tokenizer"
        elif draft.placing.draft:
            told = f"{name} cannot guess for {model.name}, as it has a draft itself: load it without one"
        elif draft.source.part == "heads" and (why := self._why_not_its_head(model, draft)):
            told = why
        else:
            return draft
        raise InvalidRequest(told, field="speculation", draft=name)

    def _why_not_its_head(self, model: ServedModel, head: ServedModel) -> str:
        """Why the head cannot guess for the model; "" if it can."""
        if head.source.path != model.source.path:
            return (
                f"{head.name} is the head of another checkpoint ({head.source.path}), so it cannot guess for "
                f"{model.name}: name a head with the path {model.source.path}"
            )
        if others := [name for name in self._targets(head) if name != model.name]:
            return (
                f"{head.name} guesses for {others[0]}, and a head guesses for one model: unload {others[0]} first, or "
                f"configure another head for {model.name}"
            )
        return ""

    async def _compare(self, model: ServedModel, text: ModelText, name: str, draft: ModelText) -> None:
        """Raises InvalidRequest if the two have different tokens."""
        one, other = text.vocabulary, draft.vocabulary
        if one is None or other is None:
            told = "" if one is other else f"{name if other is None else model.name} has no tokenizer"
        else:
            told = await asyncio.to_thread(differing_tokens, one, other)
        if told:
            raise InvalidRequest(
                f"{name} cannot guess for {model.name}, because their tokens differ ({told}): name a draft that was "
                "made with the same tokenizer",
                field="speculation",
                draft=name,
            )
