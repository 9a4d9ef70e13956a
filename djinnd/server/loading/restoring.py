"""Restores an earlier daemon's models, if they still have sessions or objects in the arena."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import suppress

from djinn_client.errors import ModelNotFound
from djinnd import config
from djinnd.server.checkpoints.records import ModelRecord
from djinnd.server.models.model import ServedModel
from djinnd.server.sessions.session import SessionRecord


def restore(
    models: MutableMapping[str, ServedModel],
    records: Iterable[ModelRecord],
    sessions: Iterable[SessionRecord],
    adopted: Collection[str],
    find: Callable[[str], ServedModel],
) -> None:
    """Adds models to `models`, which are the configured ones. `adopted`: names of models with objects in the arena."""
    sessions = [session for session in sessions if session.is_servable]
    used = {*adopted, *(session.model for session in sessions)}
    for record in records:
        if record.name not in used:
            continue
        if record.users is None:
            with suppress(ModelNotFound):  # the configuration may have changed meanwhile
                model = models[record.name] = find(record.name)
                model.template = record.template
        elif record.name not in models:
            model = models[record.name] = ServedModel.of(record.name, config.Model(path=record.folder))
            model.owner, model.users, model.marks = record.owner, set(record.users), record.files
            model.template = record.template
    for session in sessions:
        if session.model.startswith("/") and session.model not in models:  # left by a daemon without records
            model = models[session.model] = ServedModel.of(session.model, config.Model(path=session.model))
            model.owner, model.users = session.user, {session.user}
