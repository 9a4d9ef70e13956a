"""Why a session is running, or not, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from djinn_client import Why

NAMED = 8  # sessions that go first; JSON has them all


def told(session: str, why: Why) -> str:
    return "\n".join(_lines(session, why))


def _lines(session: str, why: Why) -> Iterator[str]:
    of_whom = f" of {why.user_name}" if why.user_name else ""
    yield f"{session}{of_whom} is {why.state}: {why.reason}"
    yield from (f"  {name}: {_figure(value)}" for name, value in why.figures.items())
    if why.ahead or why.others_ahead:
        yield f"served before it: {_ahead(why)}"


def _figure(value: float | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else value


def _ahead(why: Why) -> str:
    """The first of the caller's sessions by their ids, and counts of the others."""
    named = [*why.ahead[:NAMED]]
    if len(why.ahead) > NAMED:
        named.append(f"{len(why.ahead) - NAMED:,} more of yours")
    if why.others_ahead:
        named.append(f"{why.others_ahead:,} of other users")
    return ", ".join(named)
