"""Signals: one-way advice of a client on the next move of its session, with which the daemon plans."""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.bounds import Name

SignalKind = Literal["IO_WAIT", "COMPUTE", "PREFILL", "DECODE", "io_wait", "compute", "prefill", "decode"]
SIGNAL_KINDS = ("IO_WAIT", "COMPUTE", "PREFILL", "DECODE")
MAX_EXPECTED_S = 86400.0
MAX_TOOL_NAME = 64  # characters


class Signal(msgspec.Struct, tag="signal", omit_defaults=True):
    """A one-way message about the next move of the session's client. IO_WAIT: it waits for something else, `expected_s`
    seconds if that is known (0: not), so the session's pages may leave the device; `tool` names what it waits for, so
    that the daemon learns how long that takes. COMPUTE: it will call in a moment. PREFILL and DECODE mean the same.

    It is advice: a daemon ignores one that it does not understand, and one for a session that it does not know."""

    session: Name
    kind: Name  # of SIGNAL_KINDS; any word decodes, so that a newer client's does no harm
    expected_s: float = 0.0
    tool: Name = ""

    def validate(self) -> None:
        """Raises InvalidRequest."""
        if self.kind not in SIGNAL_KINDS:
            raise InvalidRequest(f"{self.kind[:64]!r} is no signal: use {', '.join(SIGNAL_KINDS)}", field="kind")
        if not 0.0 <= self.expected_s <= MAX_EXPECTED_S:  # NaN is neither
            limit = f"it must be from 0 (not known) to {MAX_EXPECTED_S:g} seconds, a day"
            raise InvalidRequest(f"expected_s is {self.expected_s:g}; {limit}", field="expected_s")
        if self.expected_s and self.kind != "IO_WAIT":
            raise InvalidRequest(f"{self.kind} takes no expected_s: only IO_WAIT does", field="expected_s")
        if len(self.tool) > MAX_TOOL_NAME:
            raise InvalidRequest(
                f"a tool's name has {len(self.tool)} characters: at most {MAX_TOOL_NAME}", field="tool"
            )
        if self.tool and self.kind != "IO_WAIT":
            raise InvalidRequest(f"{self.kind} takes no tool: only IO_WAIT does", field="tool")
