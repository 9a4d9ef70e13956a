from __future__ import annotations

from pathlib import Path

import pytest

from djinnctl.chat.transcript import Transcript, load, save

TALK = Transcript("smollm2", [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi ☺"}])


def test_a_saved_conversation_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("an older one")
    save(file, TALK)
    assert load(file) == TALK
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"model": "m", "messages": [{"role": "user"}]}', '{"model": "m", "messages": [{"content": "x"}]}'],
)
def test_a_file_without_a_conversation_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="no saved conversation"):
        load(file)
