"""Logs: one line an event on stderr, as text or as JSON.

An event is an ordinary logging call. Its message is the event's name and its values:

    log.info("session_opened session=%s user=%d", session.id, session.user)

Names and values are taken from the message's template and its arguments, so that a value keeps its type in JSON and is
one word in text. Messages of other libraries are not changed. Prompts, texts and tokens are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

_EVENT = re.compile(r"\w+(?: \w+=%\S+)*")
_VALUE = re.compile(r" (\w+)=(%\S+)")
_PLAIN = re.compile(r"""[^\s"'=\\]+""")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def configure_logging(level: str, form: str) -> None:
    """Sends this process's logs to stderr. `level` is one of LEVELS, `form` one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)  # for other libraries
    logging.getLogger("djinnd").setLevel(level.upper())
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`2026-11-21T09:30:00.123Z INFO server session_opened session=1f… user=1000`"""

    def format(self, record: logging.LogRecord) -> str:
        event, values = split(record)
        words = [_moment(record), record.levelname, record.name.removeprefix("djinnd."), event]
        words += [f"{name}={_word(spec % (value,))}" for name, spec, value in values]
        words += [f"{name}={_word(value)}" for name, value in _error(record)]
        return " ".join(words)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, values = split(record)
        line: dict[str, Any] = {"time": _moment(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"event": event} | {name: value for name, _, value in values} | dict(_error(record))
        return json.dumps(line, default=str)


def split(record: logging.LogRecord) -> tuple[str, list[tuple[str, str, Any]]]:
    """→ the event's name, and (name, % specification, value) for each of its values."""
    template = record.msg
    if not isinstance(template, str) or not _EVENT.fullmatch(template) or isinstance(record.args, dict):
        return " ".join(record.getMessage().split()), []
    specs = _VALUE.findall(template)
    arguments = record.args or ()
    if len(specs) != len(arguments):
        return " ".join(record.getMessage().split()), []
    return template.split(" ", 1)[0], [(*spec, value) for spec, value in zip(specs, arguments, strict=True)]


def _error(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """The exception and its traceback, outermost call first, in one line."""
    if not record.exc_info or record.exc_info[1] is None:
        return
    error = record.exc_info[1]
    yield "error", repr(error)
    frames = traceback.extract_tb(error.__traceback__)
    yield "at", " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)


def _moment(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
