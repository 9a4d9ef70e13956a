"""What `/set` changes: how the next answers are made and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# An answer ends where the model ends it, and Ctrl-C stops it before. Greedy choice, the default elsewhere, repeats
# itself.
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "max_tokens": None}


@dataclass
class Settings:
    """`options` are those of a call, `arguments` those of the model's chat template."""

    system: str = ""
    stats: bool = False
    options: dict[str, Any] = field(default_factory=DEFAULTS.copy)
    arguments: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, text: str) -> None:
        """Raises ValueError for an unknown name and for a value that is none, with what would be right."""
        name = name.lower().replace("-", "_")
        if name == "system":
            self.system = text
        elif name == "stats":
            self.stats = _switch(name, text)
        elif name == "think":
            self.arguments["enable_thinking"] = _switch(name, text)
        elif name == "reasoning_effort":
            self.arguments["reasoning_effort"] = text
        elif name in OPTIONS:
            self.options[name] = _value(name, text)
        else:
            raise ValueError(f"no setting is called {name!r}; there are {', '.join(NAMES)}")

    def lines(self) -> Iterator[str]:
        """The settings as they are, one a line."""
        if self.system:
            yield f"system {self.system}"
        for name, value in (self.options | self.arguments).items():
            yield f"{name} {'none' if value is None else value}"
        if self.stats:
            yield "stats on"


def _limit(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if (number := int(text)) < 1:
        raise ValueError
    return number


# The daemon checks ranges: what is wrong with a number is said by the call that brings it.
OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number, 0 or more"),
    "max_tokens": (_limit, "a whole number, 1 or more, or none"),
    "top_p": (float, "a number from 0 to 1"),
    "top_k": (int, "a whole number, 0 or more"),
    "min_p": (float, "a number from 0 to 1"),
    "repetition_penalty": (float, "a number, 1 is off"),
    "presence_penalty": (float, "a number, 0 is off"),
    "frequency_penalty": (float, "a number, 0 is off"),
    "seed": (int, "a whole number"),
}
NAMES = ("system", "think", "reasoning_effort", "stats", *OPTIONS)


def _value(name: str, text: str) -> Any:
    read, wanted = OPTIONS[name]
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{name} is {wanted}, not {text!r}") from error


def _switch(name: str, text: str) -> bool:
    if text.lower() not in ("on", "off"):
        raise ValueError(f"{name} is on or off, not {text!r}")
    return text.lower() == "on"
