"""The grammar processes of an engine: one for each principal and tokenizer. A process starts with the first call that
needs it, and ends when it has been idle for a minute."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from djinn_client.errors import Busy, TextFailed
from djinnd import messages
from djinnd.engine.grammar.process import GrammarProcess
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.tuning import GRAMMAR_IDLE, GRAMMAR_PROCESSES

Key = tuple[int, int]  # tenant, and number of the tokenizer


class GrammarProcesses:
    """Belongs to the engine's thread, which the channel wakes when one of them has answered."""

    def __init__(self, channel: ServerChannel, limits: tuple[float, int]) -> None:
        """`limits`: the seconds that one answer of a process may take, and the process's bytes of memory."""
        self._channel = channel
        self._limits = limits
        self._running: dict[Key, GrammarProcess] = {}
        self._dying: list[GrammarProcess] = []

    def __iter__(self) -> Iterator[GrammarProcess]:
        return iter([*self._running.values()])

    def __bool__(self) -> bool:
        return bool(self._running or self._dying)

    def get(self, key: Key, grammar: messages.Grammar, vocab: int) -> GrammarProcess:
        """Returns the process that runs, or starts one. Raises Busy or TextFailed if that is not possible."""
        process = self._running.get(key)
        if process is not None and not process.failure:
            return process
        if len(self._running) >= GRAMMAR_PROCESSES:
            raise Busy(
                f"{GRAMMAR_PROCESSES} grammar processes run already: try again in a minute", retry_s=GRAMMAR_IDLE
            )
        try:
            process = GrammarProcess(grammar.fd, grammar.eos, vocab, *self._limits, is_table=grammar.is_table)
        except OSError as error:
            raise TextFailed(f"no grammar process can be started: {error}") from error
        self._running[key] = process
        self._channel.watch(process.fd)
        return process

    def look_after(self, now: float, busy: Collection[GrammarProcess]) -> list[GrammarProcess]:
        """Ends processes that have been idle for a minute. Returns the processes that have failed or answer too late;
        the caller fails their runs and retires them."""
        self._dying = [process for process in self._dying if not process.is_gone]
        self._tell_seconds()
        for process in self:
            process.check(now)
            if not process.failure and process not in busy and now - process.idle_since > GRAMMAR_IDLE:
                self.retire(process)
        return [process for process in self if process.failure]

    def _tell_seconds(self) -> None:
        """Reports to the server the CPU time of each tenant's processes."""
        used: dict[int, float] = {}
        for (tenant, _), process in self._running.items():
            used[tenant] = used.get(tenant, 0.0) + process.take_seconds()
        if any(used.values()):
            self._channel.send(messages.GrammarTime(used))

    def retire(self, process: GrammarProcess) -> None:
        self._tell_seconds()
        self._channel.unwatch(process.fd)
        process.kill()
        self._dying.append(process)
        self._running = {key: each for key, each in self._running.items() if each is not process}

    def close(self) -> None:
        """Ends all processes, and waits until they are gone."""
        for process in self:
            process.kill()
        for process in (*self, *self._dying):
            process.wait()
