"""A load: groups of sessions that call again and again, of which classes and tenants, and what they ask for.

It is drawn before anything runs, so that whoever serves it, a daemon or the simulator, is asked for the same.

A session of a group is opened, makes its calls with pauses between them, and is closed. Without a rate, so many are
alive at once, and one that has ended is followed by another; with a rate, so many come in all (a Poisson process).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import msgspec
import yaml

from djinn_client.protocol.fields.scheduling import Class

Tells = Literal["none", "signals", "tool", "expected"]
Tokens = tuple[int, int]  # from the least to the most, both included


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tells`: what the daemon hears of a pause: nothing, that it begins and ends, the tool's name, too, or how long it
    will be. `forgets`: after each answer, all of it, so that KV is never what is short."""

    priority: Class = msgspec.field(name="class")
    sessions: int
    rate: float = 0.0  # a second
    tenants: tuple[int, ...] = (0,)  # that its sessions belong to, in turns
    context: Tokens  # of the first call
    prompt: Tokens = (0, 0)  # of the others
    answer: Tokens
    calls: int = 1
    pause_s: tuple[float, float] = (0.0, 0.0)  # between an answer and the next call, as between two sessions
    tells: Tells = "none"
    forgets: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    groups: dict[str, Group]
    seconds: float  # after which nobody calls any more
    weights: dict[int, float] = {}  # by tenant
    seed: int = 0

    @property
    def tenants(self) -> list[int]:
        return sorted({tenant for group in self.groups.values() for tenant in group.tenants})


class Call(NamedTuple):
    pause_s: float  # before it
    tokens: int
    answer: int


class Visit(NamedTuple):
    """One session's life."""

    group: str
    number: int  # unlike any other's of the load
    tenant: int
    arrives_s: float
    rest_s: float  # between the session before, if there was one, and this one
    calls: tuple[Call, ...]


def visits(load: Load) -> Iterator[Iterator[Visit]]:
    """The same for the same load: each inner one is of sessions that follow one another; `arrives_s` is the first's."""
    numbers = count()
    for name, group in load.groups.items():
        source = random.Random(f"{load.seed} {name}")
        now = 0.0
        for slot in range(group.sessions):
            now += source.expovariate(group.rate) if group.rate else 0.0
            yield _sessions(load, name, slot, now, numbers)


def _sessions(load: Load, name: str, slot: int, arrives_s: float, numbers: Iterator[int]) -> Iterator[Visit]:
    group = load.groups[name]
    source = random.Random(f"{load.seed} {name} {slot}")
    tenant = group.tenants[slot % len(group.tenants)]
    while True:
        calls = [Call(0.0, source.randint(*group.context), source.randint(*group.answer))]
        calls += [
            Call(source.uniform(*group.pause_s), source.randint(*group.prompt), source.randint(*group.answer))
            for _ in range(group.calls - 1)
        ]
        yield Visit(name, next(numbers), tenant, arrives_s, source.uniform(*group.pause_s), tuple(calls))
        if group.rate:
            return


def read(path: Path) -> Load:
    """Of YAML. Raises BadParameter."""
    try:
        found: Any = yaml.safe_load(path.read_text())
        return msgspec.convert(found, Load, strict=False)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
