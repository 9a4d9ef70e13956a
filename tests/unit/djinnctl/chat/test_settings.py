from __future__ import annotations

import pytest

from djinnctl.chat.settings import NAMES, Settings


def test_settings_become_options_of_calls() -> None:
    settings = Settings()
    for name, value in [
        ("system", "Answer briefly."),
        ("temperature", "0"),
        ("max-tokens", "64"),
        ("think", "off"),
        ("reasoning_effort", "high"),
        ("Stats", "ON"),
    ]:
        settings.set(name, value)
    assert settings.options == {"temperature": 0.0, "top_p": 0.95, "max_tokens": 64}
    assert settings.arguments == {"enable_thinking": False, "reasoning_effort": "high"}
    told = {name: value.strip() for name, _, value in (line.partition(" ") for line in settings.lines())}
    assert tuple(told) == NAMES, "all that there are"
    assert {name: value for name, value in told.items() if value != "-"} == {
        "system": "Answer briefly.",
        "think": "off",
        "reasoning_effort": "high",
        "stats": "on",
        "temperature": "0.0",
        "top_p": "0.95",
        "max_tokens": "64",
    }
    settings.set("max_tokens", "none")
    assert settings.options["max_tokens"] is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temprature", "1", "no setting is called 'temprature'; there are system, think"),
        ("temperature", "hot", "temperature is a number, 0 or more, not 'hot'"),
        ("max_tokens", "0", "max_tokens is a whole number, 1 or more, or none, not '0'"),
        ("think", "maybe", "think is on or off, not 'maybe'"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_valid_ones(name: str, value: str, words: str) -> None:
    settings = Settings()
    with pytest.raises(ValueError, match=words):
        settings.set(name, value)
    assert settings == Settings()
