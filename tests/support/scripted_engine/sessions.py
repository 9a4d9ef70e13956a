"""All that happens to sessions of the scripted engine between runs: beginnings, edits, classes, signals and pauses."""

from __future__ import annotations

import time

from djinnd import messages
from djinnd.core.edits import cut, ended
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.models import Models
from tests.support.scripted_engine.script import PAGE_BYTES
from tests.support.scripted_engine.session import Session


class Sessions:
    def __init__(self, channel: Channel, models: Models, sessions: dict[str, Session]) -> None:
        self._channel = channel
        self._models = models
        self._sessions = sessions

    def on_open(self, message: messages.Open) -> None:
        assert message.session not in self._sessions and message.model in self._models.infos
        self._sessions[message.session] = Session(
            message.model,
            message.tenant,
            message.tokens,
            paused="host" * message.paused,
            edits=message.edits,
            due_from=message.due_from,
        )

    def on_fork(self, message: messages.Fork) -> None:
        parent = self._sessions[message.parent]
        assert message.session not in self._sessions and parent.run is None
        self._sessions[message.session] = Session(
            parent.model,
            parent.tenant,
            list(parent.tokens),
            edits=parent.edits,
            due_from=parent.due_from,
            computed=parent.computed,
        )

    def on_truncate(self, message: messages.Truncate) -> None:
        session = self._sessions[message.session]
        assert session.run is None and message.length <= len(session.tokens)
        del session.tokens[message.length :]
        session.computed = min(session.computed, message.length)
        session.edits = cut(session.edits, message.length)

    def on_exportkv(self, export: messages.ExportKv) -> None:
        self._channel.fail(export.request, "invalid_request", "a script has no KV")

    # --- edits --------------------------------------------------------------------------------------------------------

    def on_addedit(self, message: messages.AddEdit) -> None:
        session = self._sessions[message.session]
        assert session.run is None and message.edit.number > max((edit.number for edit in session.edits), default=0)
        session.edits = (*session.edits, message.edit)
        session.due_from = min(session.due_from, message.edit.first)
        session.computed = min(session.computed, message.edit.first)

    def on_endedits(self, message: messages.EndEdits) -> None:
        session = self._sessions[message.session]
        assert session.run is None and message.edits
        assert all(not edit.over for edit in session.edits if edit.number in message.edits)
        session.edits = ended(session.edits, message.edits, message.at)
        session.due_from = min(session.due_from, message.at)
        session.computed = min(session.computed, message.at)

    # --- turns and pages ----------------------------------------------------------------------------------------------

    def on_signal(self, message: messages.Signal) -> None:
        assert message.expected_s >= 0 and (message.waits or not message.expected_s)
        session = self._sessions[message.session]
        session.waits, session.wait_of = message.waits, f"{message.tool} {message.expected_s:g}"

    def on_setclass(self, message: messages.SetClass) -> None:
        self._sessions[message.session].priority = message.priority

    def on_explain(self, message: messages.Explain) -> None:
        """Sessions are served in the order of opening. The figures are those of signals and calls."""
        session, run = self._sessions[message.session], self._sessions[message.session].run
        figures: dict[str, int | float | str] = {
            "wait_of": session.wait_of,
            "priority": session.priority,
            "expected_tokens": run.expected_tokens if run else 0,
            "between_tokens": "class" if run is None or run.between_tokens is None else run.between_tokens,
            "first_token": "class" if run is None or run.first_token is None else run.first_token,
            "deadline_in_s": run.deadline - time.monotonic() if run and run.deadline else 0.0,
        }
        state = "waiting" if session.waits else "running" if run else "idle"
        ahead = list(self._sessions)[: list(self._sessions).index(message.session)]
        self._channel.send(messages.Explained(message.request, state, "the script says so", figures, ahead))

    def on_pause(self, message: messages.Pause) -> None:
        """Fails for the disk tier, which has no room."""
        session = self._sessions[message.session]
        if message.tier == "disk":
            self._channel.refuse(message.request, "the disk is full", 1)
            return
        session.paused = message.tier
        self._channel.send(messages.Paused(message.request, session.pages, session.pages * PAGE_BYTES, 0.125))

    def on_resume(self, message: messages.Resume) -> None:
        self._sessions[message.session].paused = ""

    def on_publicprefix(self, message: messages.PublicPrefix) -> None:
        """Adds a note to the model, in the order in which sessions and prefixes came."""
        told = f"public: {len(message.tokens)} tokens before session {len(self._sessions)}"
        self._models.change(message.model, notes=[*self._models.infos[message.model].notes, told])
