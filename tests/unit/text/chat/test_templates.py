from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.text.chat.templates import chat_templates, read_template, template_for


def found(folder: Path, told: dict[str, Any] | None = None, given: str = "") -> dict[str, str]:
    with ModelFiles.open(str(folder)) as files:
        return chat_templates(files, told or {}, given)


def test_the_first_place_with_a_template_counts(tmp_path: Path) -> None:
    told = {"chat_template": "of the tokenizer"}
    assert found(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert found(tmp_path) == {"default": "of the processor"}
    assert found(tmp_path, told) == {"default": "of the tokenizer"}
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert found(tmp_path, told) == {"default": "of the file"}
    assert found(tmp_path, told, "given") == {"default": "given"}


def test_templates_have_names(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("usual")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("no template")
    templates = found(tmp_path)
    assert templates == {"default": "usual", "tool_use": "tools"}
    assert (template_for(templates, False), template_for(templates, True)) == ("usual", "tools")


def test_a_tokenizer_s_list_of_templates(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "usual"}, {"name": "rag", "template": "found"}, "?", {"name": 1}]
    assert found(tmp_path, {"chat_template": listed}) == {"default": "usual", "rag": "found"}
    assert found(tmp_path, {"chat_template": {"default": "usual"}}) == {"default": "usual"}
    assert found(tmp_path, {"chat_template": 7}) == {}


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template .*chat_template= .* use generate"):
        template_for({}, has_tools=False)
    with pytest.raises(InvalidRequest, match="templates 'rag', and none called 'default'"):
        template_for({"rag": "x"}, has_tools=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ModelRejected, match="is no text"):
        found(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ModelRejected, match="at most"):
        found(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(ModelRejected, match="cannot be read"):
        found(tmp_path)


def test_a_configured_template_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    with pytest.raises(ModelRejected, match="cannot be read"):
        read_template(str(path))
    path.write_text("mine")
    assert read_template(str(path)) == "mine"
    path.write_text("")
    with pytest.raises(ModelRejected, match="from 1 to"):
        read_template(str(path))
