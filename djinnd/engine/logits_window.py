"""Logits on their way to a client: a sealed memfd that the engine fills and then hands on by descriptor."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from djinn_client.shm import map_writable, new_window


class LogitsWindow:
    """float32 [tokens, vocab], row-major."""

    def __init__(self, tokens: int, vocab: int) -> None:
        """Raises OSError or OutOfMemory where the host has no memory for it."""
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
        """Rows from `first` on; logits: [rows, vocab] in any dtype, on the device."""
        self._rows[first : first + len(logits)].copy_(logits)

    def close(self) -> None:
        del self._rows  # and with it the mapping
        os.close(self.fd)
