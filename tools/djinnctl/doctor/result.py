"""The result of a check."""

from __future__ import annotations

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


def ok(subject: str, finding: str) -> Result:
    return Result("ok", subject, finding)


def warn(subject: str, finding: str, remedy: str) -> Result:
    return Result("warn", subject, finding, remedy)


def fail(subject: str, finding: str, remedy: str) -> Result:
    return Result("fail", subject, finding, remedy)
