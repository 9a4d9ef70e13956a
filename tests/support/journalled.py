"""A session as the journal sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from djinnd.server.probe_lists.edit_list import EditList


@dataclass
class Session:
    id: str
    tokens: list[int] = field(default_factory=list)
    user: int = 1000
    model: str = "m"
    shared: bool = False
    priority: str = "agent"
    created: float = field(default_factory=time.monotonic)
    journalled: int = 0
    edits: EditList = field(default_factory=EditList)
