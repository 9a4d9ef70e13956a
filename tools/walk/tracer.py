"""Notes each function of ours that receives the traced value as an argument, or returns it.

`sitecustomize` installs it in each Python process of the daemon. A control file switches it on: its first byte is the
number of the folder's file with the values, and 0 means off.

A function has the value if an argument or its result is the value, or holds it: a container, a message or a buffer, up
to LEVELS deep. So a check counts if it is handed the value, and a helper that is not handed it does not count. `self`
does not count, and neither does a RESTING object: the value stays there while other things happen, and its walk goes
on when a function reads it from there and passes it on.
"""

from __future__ import annotations

import array
import dataclasses
import dis
import functools
import json
import mmap
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT}/{package}/" for package in ("djinnd", "djinn_client"))
CONTROL, EVENTS, VALUES = "control", "events", "values-{}.json"
LEVELS = 4
MOST = 64  # elements of a container that are looked into
MOST_BYTES = 1 << 20
LEAST_PLACE = 200  # smaller numbers of pages and slots also mean other things
RESTING = {"Session", "Request", "SessionRecord"}
_SUSPENDABLE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


class Value(NamedTuple):
    """A sequence of numbers, the bytes that stand for it, and what it is called."""

    name: str
    numbers: list[int]
    encodings: list[bytes]

    def is_in(self, found: Any, levels: int = LEVELS) -> bool:
        if isinstance(found, bool | str | float | type) or found is None:
            return False
        if isinstance(found, int):
            return [found] == self.numbers
        if isinstance(found, bytes | bytearray | memoryview):
            return self._is_in_bytes(found)
        if type(found).__module__.partition(".")[0] in ("numpy", "torch"):
            return self._is_in_array(found)
        if isinstance(found, list | tuple | deque | array.array | set | frozenset):
            return self._is_in_numbers(list(found)) or self._is_in_any(list(found), levels)
        if isinstance(found, dict):
            return self._is_in_any([*found.keys(), *found.values()], levels)
        return self._is_in_any(list(_fields(found)), levels)

    def _is_in_any(self, elements: list[Any], levels: int) -> bool:
        return levels > 0 and any(self.is_in(element, levels - 1) for element in elements[:MOST])

    def _is_in_numbers(self, elements: list[Any]) -> bool:
        first, length = self.numbers[:1], len(self.numbers)
        if length == 1 and len(elements) > MOST:
            return False  # a list of all free places has each small number
        return bool(first) and any(
            type(element) is int and element == first[0] and elements[start : start + length] == self.numbers
            for start, element in enumerate(elements)
        )

    def _is_in_bytes(self, found: bytes | bytearray | memoryview) -> bool:
        if memoryview(found).nbytes > MOST_BYTES:
            return False
        return any(encoding in bytes(found) for encoding in self.encodings)

    def _is_in_array(self, found: Any) -> bool:
        if "int" not in str(getattr(found, "dtype", "")) or not hasattr(found, "reshape"):
            return False
        numbers = found.reshape(-1)[:MOST_BYTES].tolist()
        return self._is_in_numbers(numbers)


def _fields(found: Any) -> Any:
    """The values of a message's fields; none of another object's."""
    kind = type(found)
    if kind.__name__ in RESTING:
        return
    names = getattr(kind, "__struct_fields__", ())
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
    for name in names:
        yield getattr(found, name, None)


class Tracer:
    """The profile function of one process's threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / CONTROL).open("rb") as file:
            self._control = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._switch = 0
        self._values: list[Value] = []

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        switch = self._control[0]
        if not switch or event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_name.startswith("<"):
            return
        if switch != self._switch:
            self._switch, self._values = switch, read_values(self._folder, switch)
        if event == "return":
            passed = [result]
        elif code.co_flags & _SUSPENDABLE and frame.f_lasti > _first_entry(code):
            return  # it goes on, with the arguments that it has had since it was called
        else:
            passed = [frame.f_locals.get(name) for name in _parameters(code)]
        for value in self._values:
            if any(map(value.is_in, passed)):
                self._note(value, event, code)
                self._learn_places(value, passed)

    def _learn_places(self, page: Value, passed: list[Any]) -> None:
        """After a Move of the page has been passed, the page is also followed by the numbers of its two places."""
        for move in [found for found in passed if type(found).__name__ == "Move"]:
            new = [[place] for place in (move.source, move.target) if place >= LEAST_PLACE]
            known = [value.numbers for value in self._values]
            self._values += [Value(page.name, place, []) for place in new if place not in known]

    def _note(self, value: Value, event: str, code: CodeType) -> None:
        path = code.co_filename.removeprefix(f"{ROOT}/")
        line = json.dumps([time.monotonic_ns(), os.getpid(), value.name, event, path, code.co_qualname]) + "\n"
        with (self._folder / EVENTS).open("a") as file:  # the fork server closes descriptors that it does not know
            file.write(line)


@functools.cache
def _parameters(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    names = code.co_varnames[:count]
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


@functools.cache
def _first_entry(code: CodeType) -> int:
    """The offset at which a generator or coroutine begins to run: two instructions after its creation."""
    offsets = [step.offset for step in dis.get_instructions(code)]
    names = [step.opname for step in dis.get_instructions(code)]
    return offsets[names.index("RETURN_GENERATOR") + 2]


def read_values(folder: Path, switch: int) -> list[Value]:
    stored = json.loads((folder / VALUES.format(switch)).read_text())
    return [Value(name, numbers, [bytes.fromhex(one) for one in encodings]) for name, numbers, encodings in stored]


def install(folder: str) -> None:
    tracer = Tracer(Path(folder))
    sys.setprofile(tracer)
    threading.setprofile(tracer)


def switch_on(folder: Path, number: int, values: list[Value]) -> None:
    stored = [[name, numbers, [one.hex() for one in encodings]] for name, numbers, encodings in values]
    (folder / VALUES.format(number)).write_text(json.dumps(stored))
    switch(folder, number)


def switch(folder: Path, number: int) -> None:
    """Writes the control file; 0 switches all tracers off."""
    fd = os.open(folder / CONTROL, os.O_WRONLY | os.O_CREAT)
    os.pwrite(fd, bytes([number]), 0)
    os.close(fd)
