"""The settings that `/set` changes: how the next answers are made and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# The model ends its answers, or the user does with Ctrl-C. Greedy choice, the default elsewhere, makes chats repeat
# themselves.
# Of the tail that temperature leaves, top_p drops the unlikely tokens that derail small models.
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": None}


@dataclass
class Settings:
    """`options` are keyword arguments of `Session.chat`, `arguments` those of the model's chat template."""

    system: str = ""
    stats: bool = False
    options: dict[str, Any] = field(default_factory=DEFAULTS.copy)
    arguments: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, text: str) -> None:
        """Raises ValueError, with what would be right, for an unknown name or a value that does not fit."""
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
        """All settings and their values, one a line, as `set` takes them. The model decides what is not set."""
        told: dict[str, Any] = {"system": self.system or "-", "stats": "on" if self.stats else "off"}
        if "enable_thinking" in self.arguments:
            told["think"] = "on" if self.arguments["enable_thinking"] else "off"
        told |= {name: "none" if value is None else value for name, value in self.options.items()}
        told |= {name: value for name, value in self.arguments.items() if name in NAMES}
        width = max(map(len, NAMES))
        for name in NAMES:
            yield f"{name:<{width}}  {told.get(name, '-')}"


def _limit(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if (number := int(text)) < 1:
        raise ValueError
    return number


# Ranges are not checked here: the call that brings a wrong number is refused with the range.
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
