"""A real engine on a thread, with export and import of KV."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from djinn_client.handover.kv import KV, KvWindow
from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.kv_layout import KvLayout
from djinn_client.transport.shm import map_window
from djinnd import messages
from tests.support.engine_thread import EngineThread

SALT = b"salt of 16 bytes"


class ExportingEngine(EngineThread):
    layout: KvLayout  # of the model that was loaded last, which as a rule has no lower tiers

    def loaded(self, folder: Path, name: str = "m", **more: Any) -> ModelInfo:
        info = super().loaded(folder, name, **{"host_kv_bytes": 0, "disk_kv_bytes": 0, **more})
        self.layout = info.kv_layout
        return info

    def export(self, session: str) -> KV:
        request = self.number()
        self.send(messages.ExportKv(request, session))
        exported = self.until(messages.KvExported, messages.Stepped)
        assert exported.request == request
        memory = map_window(self.descriptors[-1], self.layout.nbytes(exported.tokens))
        return KV(self.layout, exported.tokens, memory, None)

    def import_(self, session: str, tokens: list[int], window: KvWindow, salt: bytes = SALT) -> messages.FromEngine:
        """The final reply."""
        request = self.number()
        message = messages.ImportKv(request, session, "m", 0, "agent", tokens, window.length, salt)
        socket.send_fds(self.socket, [messages.encode(message, 1)], [window.fd])
        _, reply = self.outcome(request)
        return reply

    def tokens(self, session: str, prompt: list[int], count: int) -> list[int]:
        tokens, reply = self.outcome(self.run(session, prompt, count))
        assert isinstance(reply, messages.Finished), reply
        return tokens


def filled(kv: KV) -> KvWindow:
    """A window with the same bytes."""
    window = KvWindow(kv.layout, kv.length)
    window.pages[:] = kv.pages
    return window
