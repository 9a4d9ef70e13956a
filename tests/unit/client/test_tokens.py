"""Every public call that takes an address takes a token too, and connects with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import djinn_client as djinn
from djinn_client.handover import saved_session
from djinn_client.handover.saved_session import SavedSession
from djinn_client.protocol import Failure, Hello
from tests.support.scripted_daemon import Line, ScriptedDaemon

Call = Callable[..., Any]


def public_calls() -> Iterator[tuple[str, Call]]:
    """The functions, the classes, and the methods of the classes."""
    for name in dir(djinn):
        found = getattr(djinn, name)
        if inspect.isroutine(found):
            yield name, found
        if inspect.isclass(found) and not issubclass(found, msgspec.Struct):  # which the daemon sends
            yield name, found
            for method, _ in inspect.getmembers(found, callable):
                if not method.startswith("_"):
                    yield f"{name}.{method}", getattr(found, method)


def parameters(call: Call) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(call).parameters)
    except ValueError:  # a class of the interpreter's own making
        return {}


WITH_ADDRESS = {name: call for name, call in public_calls() if "address" in parameters(call)}
ARGUMENTS: dict[str, Any] = {
    "model": "m",
    "said": "x",
    "prompt": "x",
    "inputs": "x",
    "tokens": [1],
    "kv": None,
    "session": "s-1",
    "memory_bytes": 1 << 30,
    "priority": "batch",
}
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "kv_window": {"tokens": 8},
    "share_model": {"model": {}, "config": {"model_type": "llama", "dtype": "float32"}},
}


def test_the_walk_finds_functions_classes_and_methods() -> None:
    expected = {"models", "share_model", "remote", "kv_window", "Client", "AsyncSession", "Session.attach"}
    assert expected | {"AsyncSession.from_kv", "Session.load", "load_session"} <= WITH_ADDRESS.keys()


@pytest.mark.parametrize("name", WITH_ADDRESS)
def test_a_call_that_takes_an_address_connects_with_the_token_that_it_is_given(
    name: str, daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    def refuse(line: Line) -> None:
        hello = line.expect(Hello)
        line.send(Failure(id=hello.id, code="not_authenticated", message=f"refused {hello.token}"))

    saved_session.write(tmp_path / "saved", SavedSession(model="m", fingerprint="", priority="batch", tokens=[1]), None)
    known = ARGUMENTS | {"path": tmp_path / "saved"}
    needed = [each.name for each in parameters(WITH_ADDRESS[name]).values() if each.default is each.empty]
    given = {each: known[each] for each in needed if each in known} | OWN_ARGUMENTS.get(name, {})

    async def call() -> None:
        made = WITH_ADDRESS[name](**given, address=daemon.play(refuse), token="djn_ours")
        connects = getattr(made, "open", None) or getattr(made, "ping", lambda: made)
        found = connects()
        if inspect.isawaitable(found):
            await found

    with pytest.raises(djinn.NotAuthenticated, match="refused djn_ours"):
        asyncio.run(call())
