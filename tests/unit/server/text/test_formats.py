from __future__ import annotations

import os

import pytest

from djinn_client.errors import InvalidRequest, TextFailed
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Generate, OutputFormat
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.server.models.text import ModelText, TokenMemory
from djinnd.server.text.formats import Guide, expect_no_stops
from tests.support.daemon import targets_of
from tests.support.serving import TINY

FORCED = Generate(id=1, session="s", chat=ChatInput(b"[]", tool_choice="required"))


@pytest.mark.parametrize("call", [FORCED, Generate(id=1, session="s", format=OutputFormat("regex", "a"))])
def test_an_output_with_a_grammar_does_not_stop_inside_the_model(call: Generate) -> None:
    """It would go on without its grammar."""
    with ModelFiles.open(str(TINY)) as files:
        guide = Guide(ModelText("m", files), "grammar", None)
        expect_no_stops(call, guide, has_breakpoints=False)
        with pytest.raises(InvalidRequest, match="end the session's breakpoints"):
            expect_no_stops(call, guide, has_breakpoints=True)
    expect_no_stops(Generate(id=1, session="s"), None, has_breakpoints=True)


def windows() -> int:
    """Descriptors of this process that are tables of tokens."""
    return sum("djinn-tokens" in target for target in targets_of(os.getpid()))


def test_an_unloaded_model_has_no_table_of_tokens_though_a_call_still_refers_to_it() -> None:
    with ModelFiles.open(str(TINY)) as files:
        text = ModelText("m", files)
        text.tokens = TokenMemory(b"table", {})
        guide = Guide(text, "grammar", text.tokens)
        _, fd = guide.message()
        assert os.pread(fd, 9, 0) == b"table"
        os.close(fd)
        text.close()
        text.close()
        assert windows() == 0
        with pytest.raises(TextFailed, match="has been unloaded"):
            guide.message()


def test_a_model_without_its_files_gives_no_grammar_to_an_engine() -> None:
    """A load that failed has closed them."""
    with ModelFiles.open(str(TINY)) as files:
        guide = Guide(ModelText("m", files), "grammar", None)
    with pytest.raises(TextFailed, match="has been unloaded"):
        guide.message()


def test_a_table_of_tokens_goes_with_its_model() -> None:
    memory = TokenMemory(b"table", {})
    assert windows() == 1
    del memory
    assert windows() == 0
