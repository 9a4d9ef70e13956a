from __future__ import annotations

import json
import logging

import pytest

from djinnd.telemetry import JsonFormatter, TextFormatter, configure_logging


def record(template: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("djinnd.server", logging.INFO, "server.py", 1, template, args, exc_info)


def raised() -> ZeroDivisionError:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        return error


def test_an_event_is_one_line_of_words():
    line = TextFormatter().format(record("session_opened session=%s user=%d share=%.2f", "1f", 1000, 0.5))
    moment, rest = line.split(" ", 1)
    assert moment.endswith("Z")
    assert rest == "INFO server session_opened session=1f user=1000 share=0.50"


@pytest.mark.parametrize("value", ["two words", "", 'a "quote"', "line\nbreak", "a=b"])
def test_values_with_spaces_or_newlines_are_quoted_on_one_line(value):
    line = TextFormatter().format(record("failed reason=%s", value))
    assert "\n" not in line
    assert json.loads(line.split("reason=", 1)[1]) == value


def test_a_tuple_is_one_value():
    assert TextFormatter().format(record("event pair=%s", (1, 2))).endswith('event pair="(1, 2)"')


def test_json_keeps_the_types_of_values():
    line = json.loads(JsonFormatter().format(record("engine_ready pid=%d device=%s", 7, "cpu")))
    assert line["event"] == "engine_ready"
    assert (line["pid"], line["device"], line["level"], line["logger"]) == (7, "cpu", "info", "djinnd.server")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_an_exception_stays_on_the_line_and_says_where_it_came_from(formatter):
    line = formatter.format(record("request_failed user=%d", 5, error=raised()))
    assert "\n" not in line
    assert "ZeroDivisionError" in line and "test_telemetry.py" in line and "raised" in line


@pytest.mark.parametrize(
    ("template", "args"),
    [("Some library's words: %s of %s\nhere", ("a", "b")), ("100%", ()), ("event name=%s %s", ("x", "y"))],
)
def test_messages_of_other_libraries_are_not_changed(template, args):
    line = TextFormatter().format(record(template, *args))
    assert "\n" not in line
    assert line.endswith(" ".join((template % args if args else template).split()))


def test_configuring_sends_this_process_s_logs_to_stderr(capsys):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("warning", "json")
        ours = logging.getLogger("djinnd")
        logging.getLogger("djinnd.test").info("unheard value=%d", 1)
        logging.getLogger("djinnd.test").warning("heard value=%d", 2)
        logging.getLogger("somebody.else").info("unheard")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        ours.setLevel(logging.NOTSET)
        logging.captureWarnings(False)
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err)["value"] == 2
