"""Logits on their way to a client: a sealed memfd that the engine fills and then hands on by descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor


class LogitsWindow:
    """float32 [tokens, vocab], row-major. Sealed against shrinking and growing before anybody maps it, so that no
    holder of the descriptor can make another's mapping fault."""

    def __init__(self, tokens: int, vocab: int) -> None:
        """Raises OSError when the host has no memory for it."""
        self.tokens, self.vocab = tokens, vocab
        self.fd = os.memfd_create("djinnd-logits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, tokens * vocab * 4)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.fd, tokens * vocab * 4)
        except BaseException:
            os.close(self.fd)
            raise
        self._rows = torch.frombuffer(self._memory, dtype=torch.float32).view(tokens, vocab)

    def write(self, first: int, logits: Tensor) -> None:
        """Rows from `first` on; logits: [rows, vocab] in any dtype, on the device."""
        self._rows[first : first + len(logits)].copy_(logits)

    def close(self) -> None:
        del self._rows
        self._memory.close()
        os.close(self.fd)
