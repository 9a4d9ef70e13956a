"""The rows of a batch: each is a session of its own, and all of them run beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from djinn_client.errors import DjinnError
from djinn_client.session.calls import SessionCalls
from djinn_client.transport.beside import run_beside


class Served(NamedTuple):
    """A model of the daemon, and how it is reached."""

    model: str
    address: str | None
    token: str | None


@contextmanager
def sessions(served: Served, count: int) -> Iterator[list[SessionCalls]]:
    """Opens `count` sessions. The block may add others to the list, and all of them are closed behind it. After an
    interrupt the daemon closes them when limits.session_grace is over."""
    opened = [SessionCalls(served.address, served.token) for _ in range(count)]
    try:
        run_beside([each.open(served.model, None, None) for each in opened])
        yield opened
        run_beside([each.close() for each in opened])
    except Exception:
        with suppress(DjinnError):  # the caller must see the first error
            run_beside([each.close() for each in opened])
        raise
    except BaseException:
        for each in opened:
            each.detach()
        raise


def fork_each(opened: list[SessionCalls], prompts: Sequence[list[int]], copies: int) -> None:
    """Computes the prompts, and puts `copies` sessions with its tokens in the place of each session."""
    run_beside([each.generate(prompt, max_tokens=0) for each, prompt in zip(opened, prompts, strict=True)])
    firsts = list(opened)
    for number in range(1, copies):
        forks = run_beside([each.fork(None) for each in firsts])
        for row, fork in enumerate(forks):
            opened.insert(row * (number + 1) + number, fork)
