"""A second client that nothing a test does to the daemon may disturb."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import djinn_client as djinn
from tests.support.daemon import PATIENCE

PROMPT = "def fibonacci("
TOKENS = 24


class Bystander:
    """A session that streams rounds of tokens on a thread. Leaving the context asserts that every round had the tokens
    of the first. The last round begins after the end of the context's body."""

    def __init__(self, address: str, model: str = "djinn-tiny") -> None:
        self._address = address
        self._model = model
        self._streaming = threading.Event()
        self._stop = threading.Event()
        self._rounds: list[list[int]] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bystander")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._streaming.wait(PATIENCE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the bystander's stream stands still"
        if self._failure is not None:
            raise self._failure
        assert all(tokens == self._rounds[0] for tokens in self._rounds)
        assert len(self._rounds) > 1 and len(self._rounds[0]) == TOKENS

    def _run(self) -> None:
        try:
            with djinn.Session(self._model, address=self._address) as s:
                is_last = False
                while not is_last:
                    is_last = self._stop.is_set()
                    self._rounds.append(self._read(s))
                    s.truncate(0)
        except BaseException as failure:  # raised on the test's thread
            self._failure = failure
        finally:
            self._streaming.set()

    def _read(self, s: djinn.Session) -> list[int]:
        tokens: list[int] = []
        for piece in s.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True):
            tokens += piece.token_ids
            self._streaming.set()
        return tokens
