"""The file with the tokens, `tokens` in the state directory: one line with a checksum, then JSON.

Only the daemon's user may read it. It is replaced as a whole, so a crash leaves the old content or the new. A bit that
flips on the disk could make a token stand for another user. So a file with a wrong checksum is set aside, and none of
its tokens is valid. Names keep their numbers nevertheless: see djinnd/config/principals.py.
"""

from __future__ import annotations

import logging
import os
import time
from hashlib import sha256
from pathlib import Path

import msgspec

from djinn_client.handover.saved_session import sync_folder
from djinnd.server.handover.socket_path import StartError
from djinnd.server.principals.book import TokenFileContent
from djinnd.server.system.whole_file import replace_file

log = logging.getLogger("djinnd.server")

NAME = "tokens"
_MAGIC = b"djinnd-tokens-1 "


class TokenFile:
    """Reads and writes the file."""

    def __init__(self, state_dir: str) -> None:
        self.path = Path(state_dir, NAME)

    def read(self) -> TokenFileContent:
        """Reads the tokens at start. A damaged file is set aside, and then there are none. Raises StartError if the
        file cannot be read: a daemon without its tokens would refuse every connection that shows one."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return TokenFileContent()
        except OSError as error:
            raise StartError(f"the tokens in {self.path} cannot be read: {error}") from error
        try:
            return _content(data)
        except ValueError as error:
            self._set_aside(error)
            return TokenFileContent()

    def write(self, content: TokenFileContent) -> None:
        """Writes the file, and returns when it is on disk. Raises OSError."""
        payload = msgspec.json.encode(content)
        replace_file(self.path, _MAGIC + sha256(payload).hexdigest().encode() + b"\n" + payload)

    @property
    def damaged_files(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{NAME}.damaged-*"))

    @property
    def notes(self) -> list[str]:
        """Notes for administrators."""
        return [
            f"the file with the tokens was damaged; it is kept as {path}: add the tokens again, and remove that file"
            for path in self.damaged_files
        ]

    def _set_aside(self, error: ValueError) -> None:
        """Renames the damaged file, for people to examine. Raises StartError."""
        aside = self.path.with_name(f"{NAME}.damaged-{time.time_ns()}")
        try:
            os.rename(self.path, aside)
            sync_folder(self.path.parent)
        except OSError as failed:
            raise StartError(f"{self.path} is damaged ({error}), and cannot be set aside: {failed}") from failed
        log.error("tokens_damaged path=%s error=%s kept=%s", self.path, error, aside)


def _content(data: bytes) -> TokenFileContent:
    """Decodes the file. Raises ValueError with the fault."""
    head, _, payload = data.partition(b"\n")
    if not head.startswith(_MAGIC):
        raise ValueError("it does not begin as a file of tokens does")
    if head.removeprefix(_MAGIC) != sha256(payload).hexdigest().encode():
        raise ValueError("its checksum is wrong")
    return msgspec.json.decode(payload, type=TokenFileContent)
