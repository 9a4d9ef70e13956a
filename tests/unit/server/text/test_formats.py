from __future__ import annotations

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Generate, OutputFormat
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.server.models.text import ModelText
from djinnd.server.text.formats import Guide, expect_no_stops
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
