"""One session as the head of its model's checkpoint knows it: which tokens have KV there, and which hidden states wait.

    position   0 1 2 3 4 5 6 7 8
    tokens     5 8 2 9 7 4 1 6 3      the session's text
    hidden           h h h h h        kept: of positions computed - 1, computed, …
    KV             · 9 7 …            of the tokens from `first` on: here first = 3, and computed = 3

The head runs a token with the hidden state before it. The target gives that state in the step that runs the position.
Some positions are never run by a step, because their KV is shared or comes from a lower tier. If the hidden state
before a token is missing, the head begins again behind it, so its text is the end of the session's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinnd.core.drafted import Drafted
from djinnd.core.guesser import Record


class Headed(Drafted):
    """`kept`: the places of hidden states. `give_back` gets places that it needs no more."""

    def __init__(self, tokens: Sequence[int], record: Record, give_back: Callable[[Sequence[int]], None]) -> None:
        super().__init__(tokens, record)
        self.kept: list[int] = []
        self._give_back = give_back
        self.first = self.computed = 1  # no hidden state comes before token 0

    @property
    def runnable(self) -> int:
        """Tokens that the head can run next: of the text, and each with a hidden state before it."""
        return max(min(self.missing, len(self.kept)), 0)

    @property
    def is_ready(self) -> bool:
        return 0 < self.missing <= len(self.kept)

    def arrive(self, start: int, end: int) -> range:
        """A step gives the hidden states of the positions [start, end). → those of them that are needed. The caller
        adds their places to `kept`."""
        if start > self._known:
            self._begin_at(start + 1)
        else:
            self._keep(max(start - self.computed + 1, 0))
        return range(max(start, self.computed - 1), end)

    def skip(self) -> None:
        """Begins again behind all hidden states that are kept: there is no room for them, or for their KV."""
        self._begin_at(self._known + 1)

    def cut(self, length: int) -> None:
        self._keep(max(length - self.computed + 1, 0))
        super().cut(max(length, 1))
        self.first = min(self.first, self.computed)

    def lose(self) -> None:
        self.first, self._guess = self.computed, ()

    def ran(self, computed: int) -> None:
        taken = computed - self.computed
        self._give_back(self.kept[:taken])
        del self.kept[:taken]
        self.computed = computed

    def guessed(self, guess: Sequence[int]) -> None:
        self.ran(len(self._tokens))
        super().guessed(guess)

    def close(self) -> None:
        """Gives all places back."""
        self._keep(0)

    @property
    def _known(self) -> int:
        """The first position without a hidden state."""
        return self.computed - 1 + len(self.kept)

    def _begin_at(self, position: int) -> None:
        self._keep(0)
        self.first = self.computed = position
        self._guess = ()

    def _keep(self, count: int) -> None:
        self._give_back(self.kept[count:])
        del self.kept[count:]

    def _keep_kv(self, right: int, guess: Sequence[int], came: Sequence[int]) -> None:
        """Guessed tokens are run again, with the target's hidden states."""
