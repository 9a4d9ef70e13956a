"""The loop of the intervention process: loads functions, calls them with the activation of a hit, and sends their
changes back as edits. A tenant's code can tamper with all of this, so the server checks every message."""

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
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import AddEdit, Generated, Timings, Usage
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.tensors.hits import Hit
from djinn_client.transport.shm import new_window
from djinn_client.whitebox import breakpoint_calls
from djinn_client.whitebox.interventions import Function, apply
from djinnd.confinement.channel import ConfinedChannel
from djinnd.jobs import sandbox as interventions
from djinnd.jobs.sandbox import (
    MAX_FRAME,
    CallFunctions,
    ForgetFunctions,
    FromProcess,
    FunctionEdit,
    FunctionsDone,
    FunctionsFailed,
    Key,
    LoadFunction,
    ToProcess,
    decode_to_process,
)

_MOST_TOLD = 2000  # characters of an exception that are reported


def channel_to_server(sock: socket.socket) -> ConfinedChannel[ToProcess, FromProcess]:
    return ConfinedChannel(sock, MAX_FRAME, decode_to_process, interventions.encode)


class _Loaded(NamedTuple):
    point: str
    call: Function


class _Raised(Exception):
    """`error` was raised by a function, or by handling its code or result; `what` says which."""

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(what)
        self.what = what
        self.error = error


class FunctionService:
    """Owns the loaded functions. memory: bytes that functions may take, for error messages."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._functions: dict[Key, _Loaded] = {}

    def serve(self, channel: ConfinedChannel[ToProcess, FromProcess]) -> None:
        """Serves until the server closes the socket. An exception of a function is reported, and the process goes
        on."""
        for message, fds in channel.messages():
            if isinstance(message, ForgetFunctions):
                for key in message.functions:
                    self._functions.pop(key, None)
                continue
            act = partial(self.load, message) if isinstance(message, LoadFunction) else partial(self.run, message, fds)
            for answer in self._answers(act):
                channel.send(answer)

    def load(self, message: LoadFunction) -> list[AddEdit]:
        """Unpickles a function. Raises _Raised, or InvalidRequest for an object that is not callable."""
        with _telling("the function cannot be unpickled"):
            function = pickle.loads(message.code)
        if not callable(function):
            raise InvalidRequest(f"a function was expected, not an object of type {type(function).__name__}")
        self._functions[message.function] = _Loaded(message.point, function)
        return []

    def run(self, message: CallFunctions, fds: list[int]) -> list[AddEdit]:
        """Calls the functions, and returns edits that make the same changes to the activation. Closes the
        descriptors."""
        with _telling("the activation cannot be mapped"):
            hit = _hit_of(message, fds)
        for key in message.functions:
            function = self._functions[key]
            with _telling(f"the function at {function.point} raised"):
                apply(function.call, function.point, hit)
        with _telling("the activation that the functions changed cannot be read", InvalidRequest):
            return breakpoint_calls.replacing(message.functions[0][0], hit, None, hit.changes(None))

    def _answers(self, act: Callable[[], list[AddEdit]]) -> list[FromProcess]:
        try:
            edits = act()
        except InvalidRequest as error:  # raised by the client library for a bad result, as it would be in the client
            return [FunctionsFailed("invalid_request", error.message)]
        except _Raised as raised:
            return [FunctionsFailed("function_failed", self._account(raised.what, raised.error))]
        return [*map(FunctionEdit, edits), FunctionsDone()]

    def _account(self, what: str, error: BaseException) -> str:
        """An error message for an exception: its text and the last line of the tenant's code in its traceback. After an
        out-of-memory error it drops the traceback, whose frames may hold all of the memory."""
        if isinstance(error, MemoryError) or (type(error) is RuntimeError and "can't allocate memory" in str(error)):
            error.__traceback__ = error.__context__ = None
            return f"{what}: out of memory; it may take {self._memory:,} bytes (functions.memory)"
        told = "".join(traceback.format_exception_only(error)).strip()[:_MOST_TOLD]
        theirs = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
        lines = [each for each in theirs if each.filename == theirs[0].filename]  # without frames of libraries
        return f"{what}: {told} ({_place(lines[-1])})" if lines else f"{what}: {told}"


_OURS = tuple(str(module.__path__[0]) + os.sep for module in (djinnd, djinn_client))


def _place(frame: traceback.FrameSummary) -> str:
    """Function, line and file of a frame. The file is left out if unknown: from 3.1.3 on, cloudpickle omits it from
    code that is pickled by value."""
    file = "" if frame.filename == "<dynamic-code>" else f" of {frame.filename}"
    return f"in {frame.name}, line {frame.lineno}{file}"


@contextmanager
def _telling(what: str, *but: type[Exception]) -> Iterator[None]:
    """Turns exceptions into _Raised(what, exception), except those of the types `but`."""
    try:
        yield
    except but:
        raise
    except BaseException as error:
        raise _Raised(what, error) from None


def _hit_of(message: CallFunctions, fds: list[int]) -> Hit:
    """The hit as Session.run returns it. Raises the errors of Hit."""
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
    """Runs everything once before the process confines itself, because libraries import modules and query the machine
    at first use."""
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
    serving = FunctionService(0)
    for function in (_scale, _fail):
        serving.load(LoadFunction(("", 1), "hook_embed", pickle.dumps(function)))
        window = new_window("rehearsal", captured.nbytes)
        serving._answers(partial(serving.run, CallFunctions([("", 1)], hit, captured), [window]))


def _scale(activation: Any, context: Any) -> Any:
    return (activation + torch.ones(8, dtype=torch.bfloat16)) @ torch.eye(8, dtype=torch.bfloat16)


def _fail(activation: Any, context: Any) -> None:
    raise ValueError("part of the rehearsal")
