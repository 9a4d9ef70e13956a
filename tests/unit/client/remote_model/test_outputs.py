"""Rows go on token by token, until the criteria end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from djinn_client.errors import Cancelled
from djinn_client.protocol import Cancel, CloseSession, Done, Generate, Generated, Piece, Timings, Usage
from djinn_client.remote_model.outputs import Output, read_all
from djinn_client.remote_model.rows import Served, sessions
from tests.support.scripted_daemon import Line, ScriptedDaemon

PAD = 0


def saying(pieces: Sequence[list[int]], *, is_stopped: bool = False) -> Callable[[Line], None]:
    """A row that brings these tokens. The client then stops it, or it ends by itself."""

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(*(Piece(id=request.id, text="", token_ids=tokens) for tokens in pieces))
        if is_stopped:
            line.expect(Cancel)
        ended = {"finish_reason": "cancelled", "usage": Usage(), "timings": Timings()}
        line.send(Generated(id=request.id, text="", token_ids=[], **ended))
        line.send(Done(id=line.expect(CloseSession).id))

    return script


def read(address: str, rows: int, criteria: Callable[[Tensor, None], Tensor], pad: int | None) -> list[list[int]]:
    with sessions(Served("djinn-tiny", address, ""), rows) as opened:
        outputs = [Output(each, [7], each.stream([7], {})) for each in opened]
        return read_all(outputs, torch.full((rows, 1), 7), criteria, pad, None).tolist()


def at_nine(ids: Tensor, scores: None) -> Tensor:
    return ids[:, -1] == 9


def test_a_row_that_has_ended_is_padded_and_stopped_in_the_daemon(daemon: ScriptedDaemon) -> None:
    """Tokens of one piece are taken one by one."""
    address = daemon.play(saying([[9]], is_stopped=True), saying([[1, 2], [9, 3]], is_stopped=True))
    assert sorted(read(address, 2, at_nine, PAD)) == [[7, 1, 2, 9], [7, 9, PAD, PAD]]


def test_without_padding_all_rows_go_on_until_the_last_has_ended(daemon: ScriptedDaemon) -> None:
    address = daemon.play(saying([[9], [5, 6]], is_stopped=True), saying([[1], [2], [9]], is_stopped=True))
    assert sorted(read(address, 2, at_nine, None)) == [[7, 1, 2, 9], [7, 9, 5, 6]]


def test_an_output_that_ends_before_its_criteria_say_so_is_an_error(daemon: ScriptedDaemon) -> None:
    with pytest.raises(Cancelled, match="an output ended after 2 tokens, before it was complete: cancelled"):
        read(daemon.play(saying([[1], [2]])), 1, at_nine, PAD)
