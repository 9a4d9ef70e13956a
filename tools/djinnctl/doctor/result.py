"""The result of a check."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec


class Result(msgspec.Struct, frozen=True):
    """`remedy` says what to do next; a result that is not ok always has one."""

    state: Literal["ok", "warn", "fail"]
    subject: str
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.state == "ok") == (not self.remedy), self


ok, warn, fail = partial(Result, "ok"), partial(Result, "warn"), partial(Result, "fail")
