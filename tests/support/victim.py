"""A client that streams while others attack: it records its tokens and its longest wait."""

from __future__ import annotations

import threading
import time

import djinn_client as djinn

PROMPT = [1, 2, 3]
TOKENS = 400  # of a call


class Victim:
    """Streams the same greedy call of djinn-tiny over and over, on a thread, until `stop`.

    `expected`: the tokens of a call without an attack. `longest`: most seconds between two pieces.
    """

    def __init__(self, address: str) -> None:
        self.longest = 0.0
        self.calls = 0
        self.error: BaseException | None = None
        self._address = address
        self._stopping = threading.Event()
        self.expected = self._call()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._live, name="victim")
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _live(self) -> None:
        try:
            while not self._stopping.is_set():
                assert self._call() == self.expected, "other tokens than alone"
                self.calls += 1
        except BaseException as error:
            self.error = error

    def _call(self) -> list[int]:
        tokens: list[int] = []
        with djinn.Session("djinn-tiny", address=self._address) as session:
            last = time.monotonic()
            for piece in session.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True):
                tokens += piece.token_ids
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now
        return tokens
