"""Old names of the public interface. They work for one release, with a warning that names the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def warn_of(old: str, new: str, *, stacklevel: int = 4) -> None:
    """Warns at the line of the caller that has used the old name: by default three calls above, where steps run."""
    warnings.warn(f"{old} is {new} now, and goes with the next release", DeprecationWarning, stacklevel=stacklevel + 1)


class _ReadOrCalled:
    """A bound method that can be read as the list that it returns: `s.token_ids` was a property."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __call__(self) -> Any:
        return self._call()

    def _read(self) -> Any:
        warn_of("the property token_ids", "a method, token_ids()", stacklevel=3)
        return self._call()

    def __await__(self) -> Iterator[Any]:
        waiting: Iterator[Any] = self._read().__await__()
        return waiting

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._read() == other)

    __hash__ = None  # type: ignore[assignment]  # as of a list


class _FormerProperty:
    def __init__(self, method: Callable[[Any], Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else _ReadOrCalled(self._method.__get__(instance))


def former_property(method: Callable[[S], T]) -> Callable[[S], T]:
    """A method that was a property: type checkers see a method."""
    found: Any = _FormerProperty(method)
    return found  # type: ignore[no-any-return]
