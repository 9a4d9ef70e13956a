"""The loop of the intervention process: functions come, are called with what has come to a hit, and what they have
changed goes back as edits. All of it is the tenant's own code's to spoil, and so the server's to judge."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import djinn_client
import djinnd
from djinn_client import breaking
from djinn_client.breakpoints import HitInfo
from djinn_client.edits import Captured, CapturedPoint
from djinn_client.errors import InvalidRequest
from djinn_client.hits import Hit
from djinn_client.interventions import Function, apply
from djinn_client.protocol import AddEdit, Generated, Timings, Usage
from djinn_client.shm import new_window
from djinnd import interventions
from djinnd.confinement.channel import Channel
from djinnd.interventions import (
    MAX_FRAME,
    Changed,
    Done,
    Failed,
    Forget,
    FromProcess,
    Key,
    Load,
    Run,
    ToProcess,
    decode_to_process,
)

_MOST_TOLD = 2000  # characters of an exception


def channel_to_server(sock: socket.socket) -> Channel[ToProcess, FromProcess]:
    return Channel(sock, MAX_FRAME, decode_to_process, interventions.encode)


class _Loaded(NamedTuple):
    point: str
    call: Function


class _Raised(Exception):
    """`error` was, by the function or over what it has made."""

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(what)
        self.what = what
        self.error = error


class Serving:
    """`memory`: bytes that functions may take, to be told to who has taken them."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._functions: dict[Key, _Loaded] = {}

    def serve(self, channel: Channel[ToProcess, FromProcess]) -> None:
        """Until the server hangs up. An exception of a function is told, and the process goes on."""
        for message, fds in channel.messages():
            if isinstance(message, Forget):
                for key in message.functions:
                    self._functions.pop(key, None)
                continue
            act = partial(self.load, message) if isinstance(message, Load) else partial(self.run, message, fds)
            for answer in self._answers(act):
                channel.send(answer)

    def load(self, message: Load) -> list[AddEdit]:
        with _telling("the function cannot be unpickled"):
            function = pickle.loads(message.code)
        if not callable(function):
            raise InvalidRequest(f"what was sent is of type {type(function).__name__}, and no function")
        self._functions[message.function] = _Loaded(message.point, function)
        return []

    def run(self, message: Run, fds: list[int]) -> list[AddEdit]:
        """The edits that go on with what the functions have made of the activation. Closes the descriptors."""
        with _telling("the activation cannot be mapped"):
            hit = _hit_of(message, fds)
        for key in message.functions:
            function = self._functions[key]
            with _telling(f"the function at {function.point} raised"):
                apply(function.call, function.point, hit)
        with _telling("what the functions have made of the activation cannot be read", InvalidRequest):
            return breaking.replacing(message.functions[0][0], hit, None, hit.changes(None))

    def _answers(self, act: Callable[[], list[AddEdit]]) -> list[FromProcess]:
        try:
            edits = act()
        except InvalidRequest as error:  # the library's, of what has come back: as in the client
            return [Failed("invalid_request", error.message)]
        except _Raised as raised:
            return [Failed("function_failed", self._account(raised.what, raised.error))]
        return [*map(Changed, edits), Done()]

    def _account(self, what: str, error: BaseException) -> str:
        """Of an exception that may hold all of the memory, by the frames that it has come through."""
        if isinstance(error, MemoryError) or (type(error) is RuntimeError and "can't allocate memory" in str(error)):
            error.__traceback__ = error.__context__ = None
            return f"{what}: out of memory; it may take {self._memory:,} bytes (functions.memory)"
        told = "".join(traceback.format_exception_only(error)).strip()[:_MOST_TOLD]
        theirs = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
        lines = [each for each in theirs if each.filename == theirs[0].filename]  # not those of what it has called
        return f"{what}: {told} ({_place(lines[-1])})" if lines else f"{what}: {told}"


_OURS = tuple(str(module.__path__[0]) + os.sep for module in (djinnd, djinn_client))


def _place(frame: traceback.FrameSummary) -> str:
    """Without its file where nobody knows it: from 3.1.3 on cloudpickle leaves it away in code that goes by value."""
    file = "" if frame.filename == "<dynamic-code>" else f" of {frame.filename}"
    return f"in {frame.name}, line {frame.lineno}{file}"


@contextmanager
def _telling(what: str, *but: type[Exception]) -> Iterator[None]:
    try:
        yield
    except but:
        raise
    except BaseException as error:
        raise _Raised(what, error) from None


def _hit_of(message: Run, fds: list[int]) -> Hit:
    """As Session.run would have given it. Raises as Hit."""
    generated = Generated(
        id=0,
        text="",
        token_ids=[],
        finish_reason="breakpoint",
        usage=Usage(),
        timings=Timings(),
        captured=message.captured,
        hit=message.hit,
    )
    return Hit(generated, fds)


def rehearse() -> None:
    """Everything once, before the sandbox is closed, because much is imported, or asked of the machine, when it is
    first used."""
    rows, width = 2, 8
    captured = Captured(
        dtype="bfloat16",
        first=0,
        positions=rows,
        room=rows,
        nbytes=rows * width * 2,
        points=[CapturedPoint("hook_embed", width, 0)],
    )
    hit = HitInfo(breakpoint=1, point="hook_embed", block=0, first=0, end=rows, prompt_end=rows)
    serving = Serving(0)
    for function in (_scale, _fail):
        serving.load(Load(("", 1), "hook_embed", pickle.dumps(function)))
        window = new_window("rehearsal", captured.nbytes)
        serving._answers(partial(serving.run, Run([("", 1)], hit, captured), [window]))


def _scale(activation: Any, context: Any) -> Any:
    return (activation + torch.ones(8, dtype=torch.bfloat16)) @ torch.eye(8, dtype=torch.bfloat16)


def _fail(activation: Any, context: Any) -> None:
    raise ValueError("as it should")
