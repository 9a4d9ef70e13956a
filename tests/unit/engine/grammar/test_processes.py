from __future__ import annotations

import os
import select
import time
from typing import Any

from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd import messages
from djinnd.engine.grammar.processes import GrammarProcesses
from djinnd.jobs.grammar import BeginGrammar
from djinnd.text.grammar import grammar_text
from tests.support.serving import TINY


class ServerChannel:
    """Keeps the messages to the server."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def watch(self, fd: int) -> None: ...
    def unwatch(self, fd: int) -> None: ...


def test_the_server_is_told_the_cpu_time_of_each_tenant() -> None:
    channel, tenant = ServerChannel(), 7
    processes = GrammarProcesses(channel, (30.0, 1 << 30))  # type: ignore[arg-type]
    grammar = grammar_text(OutputFormat("json_object"))
    with open(TINY / "tokenizer.json", "rb") as tokenizer:
        wanted = messages.Grammar(grammar, 1, False, [0], fd=os.dup(tokenizer.fileno()))
        process = processes.get((tenant, 1), wanted, 4096)
    try:
        process.ask(BeginGrammar(1, process.free.pop(), grammar, []), [1])
        until = time.monotonic() + 30
        heard = process.read_answers()
        while not (heard.plain or heard.others or process.failure) and time.monotonic() < until:
            select.select([process.fd], (), (), 1.0)
            heard = process.read_answers()
        processes.look_after(time.monotonic(), [process])
        (told,) = channel.sent
        assert isinstance(told, messages.GrammarTime) and 0 < told.seconds[tenant] < 30
        processes.look_after(time.monotonic(), [process])
        assert sum(each.seconds[tenant] for each in channel.sent[1:]) < told.seconds[tenant]
    finally:
        processes.close()
