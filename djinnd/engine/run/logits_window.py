"""A sealed memfd of logits for a client: the engine fills it and passes its descriptor on."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from djinn_client.transport.shm import map_writable, new_window


class LogitsWindow:
    """float32 [tokens, vocab], row-major."""

    def __init__(self, tokens: int, vocab: int) -> None:
        """Raises OSError or OutOfMemory if the host has no memory for it."""
        self.tokens, self.vocab = tokens, vocab
        nbytes = tokens * vocab * 4
        self.fd = new_window("djinnd-logits", nbytes)
        try:
            memory = map_writable(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._rows = torch.frombuffer(memory, dtype=torch.float32).view(tokens, vocab)

    def write(self, first: int, logits: Tensor) -> None:
        """Writes rows from `first` on. logits: [rows, vocab] on the device, any dtype."""
        self._rows[first : first + len(logits)].copy_(logits)

    def close(self) -> None:
        del self._rows  # unmaps the memory
        os.close(self.fd)
