"""The outputs of a batch, token by token: transformers' own criteria decide after each token which of them go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from djinn_client.errors import Cancelled
from djinn_client.session.calls import SessionCalls
from djinn_client.session.streaming import StreamSteps
from djinn_client.transport.beside import run_beside
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Criteria = Callable[[Tensor, None], Tensor]  # a StoppingCriteriaList


class Output:
    """The output of one session, as it arrives."""

    def __init__(self, session: SessionCalls, prompt: list[int], stream: StreamSteps) -> None:
        self._session = session
        self._prompt = prompt
        self._stream = stream
        self._waiting: deque[int] = deque()
        self.tokens: list[int] = []  # taken so far

    def more(self) -> Steps[None]:
        """Waits until a token is there, or the output has ended."""
        while not self._waiting and (piece := (yield from self._stream.next())) is not None:
            self._waiting.extend(piece.token_ids)

    def take(self) -> int:
        """The next token. Raises Cancelled if the output has ended before it was complete."""
        if not self._waiting:
            reason = self._stream.result.finish_reason
            raise Cancelled(f"an output ended after {len(self.tokens):,} tokens, before it was complete: {reason}")
        self.tokens.append(self._waiting.popleft())
        return self.tokens[-1]

    def end(self) -> None:
        """Stops the work in the daemon, if there is any left. A second time does nothing."""
        self._stream.close()

    def logits(self) -> Steps[npt.NDArray[np.float32]]:
        """The logits from which the tokens were chosen, computed anew in one pass: float32 [tokens, vocab]."""
        yield from self._session.truncate(len(self._prompt) - 1)
        return (yield from self._session.forward([self._prompt[-1], *self.tokens[:-1]]))


def read_all(outputs: Sequence[Output], prompts: Tensor, criteria: Criteria, pad: int | None, streamer: Any) -> Tensor:
    """Returns prompts and outputs, int64 [rows, length]. A row that has ended goes on with `pad`. If `pad` is None, it
    goes on with what the model says until all rows have ended, as in transformers."""
    whole = prompts
    is_open = [True] * len(outputs)
    while any(is_open):
        is_wanted = is_open if pad is not None else [True] * len(outputs)
        run_beside([output.more() for output, wanted in zip(outputs, is_wanted, strict=True) if wanted])
        taken = [output.take() if wanted else pad for output, wanted in zip(outputs, is_wanted, strict=True)]
        tokens = torch.tensor(taken, dtype=torch.int64)
        whole = torch.cat([whole, tokens[:, None]], dim=1)
        is_done = criteria(whole, None).tolist()
        is_open = [was and not done for was, done in zip(is_open, is_done, strict=True)]
        if streamer is not None:
            streamer.put(tokens)
        for output, goes_on in zip(outputs, is_open, strict=True):
            if not goes_on and pad is not None:
                output.end()
    for output in outputs:
        output.end()
    return whole


def logits_of_all(outputs: Sequence[Output]) -> tuple[Tensor, ...]:
    """For each token the logits from which it was chosen, float32 [rows, vocab]; zeros in rows that had ended."""
    rows = [torch.from_numpy(logits) for logits in run_beside([output.logits() for output in outputs])]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).unbind(dim=1)
