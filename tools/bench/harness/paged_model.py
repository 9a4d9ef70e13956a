"""One model in a private daemon, with a page pool of known size, so that evicted KV is really gone from the device.

A page that a session gives up keeps its bytes, and the session finds it again until another session gets the page. So a
bench that wants a session to come back from a lower tier first has the whole pool overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import djinn_client as djinn
from djinn_client.protocol import Tier
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt

MODEL = "m"
FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
PATIENCE_S = 300.0
QUIET_S = 2.0  # a daemon on a GPU captures the graphs of recent steps in this time
SPARE = 64  # tokens of a session beyond its context
LIMITS = {"sessions": 8192, "sessions_per_user": 8192, "connections_per_user": 8192}


def without_text(checkpoint: Path, folder: Path) -> Path:
    """Makes a checkpoint of links without the tokenizer's files."""
    bare = folder / checkpoint.name
    bare.mkdir()
    for pattern in FILES:
        for file in checkpoint.glob(pattern):
            (bare / file.name).symlink_to(file.resolve())
    return bare


def daemon_of(
    checkpoint: Path, device: str, memory: str, settings: Mapping[str, Any], folder: Path | None, **others: Any
) -> AbstractContextManager[str]:
    """A daemon whose configuration has the checkpoint as `MODEL`, not loaded yet, and gives the daemon's address.

    Its state is below `folder`, by default with temporary files. `others` are further settings of the daemon.
    """
    model = {"path": str(checkpoint), **settings}
    config = {"device": device, "memory": memory, "limits": LIMITS, "models": {MODEL: model}, **others}
    return private_daemon(config, folder)


class PagedModel:
    """The loaded model. Sessions begin with `tokens` tokens, and have one page more to fill."""

    def __init__(self, address: str, info: djinn.ModelInfo, tokens: int) -> None:
        self.address = address
        self.info = info
        self.tokens = min(tokens, info.max_context - SPARE)
        self._client = djinn.Client(address)
        self.quiet_s = 0.0  # wait after the first steps of a kind, until later ones have their final speed
        self._seeds = count(int.from_bytes(info.fingerprint[:2].encode(), "big"))

    @property
    def session_pages(self) -> int:
        """The most pages that a session takes."""
        return -(-(self.tokens + SPARE) // self.info.page_size)

    def pool_bytes(self, *tokens: int) -> int:
        """Bytes of a pool that is full with sessions of these many tokens each."""
        pages = sum(-(-(one + SPARE) // self.info.page_size) for one in tokens)
        return (pages + 1) * self.info.page_bytes

    def prompt(self, tokens: int) -> list[int]:
        """Draws a prompt that the daemon has not seen."""
        return prompt(tokens, self.info.vocab, next(self._seeds))

    def session(self, tokens: int = 0) -> djinn.Session:
        """Opens a session with the KV of a prompt, and one generated token that has no KV yet. `tokens` 0: the usual
        length."""
        session = djinn.Session(MODEL, address=self.address)
        session.generate(self.prompt(tokens or self.tokens), max_tokens=1, ignore_eos=True)
        return session

    def overwrite(self) -> None:
        """Fills every page that no session holds, and frees it again. A pool hands out full pages last, and among them
        the page that was free first; so no page is filled twice before all pages have been."""
        size = self.info.page_size
        most = min(self.session_pages, (self.info.max_context - 1) // size)
        now = self.now()
        for _ in range(0, now.pages - now.pages_used, most):
            self.session(most * size).close()

    def now(self) -> djinn.ModelInfo:
        """The daemon's figures of the model."""
        return next(model for model in self._client.models() if model.name == MODEL)

    def state(self, session: djinn.Session) -> djinn.SessionInfo:
        return next(info for info in self._client.sessions() if info.id == session.id)

    def wait_until(self, session: djinn.Session, wanted: Callable[[djinn.SessionInfo], bool]) -> djinn.SessionInfo:
        deadline = time.monotonic() + PATIENCE_S
        while not wanted(info := self.state(session)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"session {session.id} is {info.state} after {PATIENCE_S:.0f} s")
        return info

    def close(self) -> None:
        self._client.close()


def _has(info: djinn.ModelInfo, tiers: Sequence[Tier]) -> bool:
    """True when the tiers have pages and all host pages are pinned."""
    return all(getattr(info, f"{tier}_pages") for tier in tiers) and info.host_pages_pinned == info.host_pages


@contextmanager
def loaded(address: str, tokens: int, kv_bytes: int = 0, tiers: Sequence[Tier] = ()) -> Iterator[PagedModel]:
    """Loads the model with a pool of so many bytes (0: the daemon's choice) and only these lower tiers, and unloads it
    at the end. Waits until the host's pages are pinned."""
    host, disk = (None if tier in tiers else 0 for tier in ("host", "disk"))
    info = djinn.load(MODEL, kv_bytes=kv_bytes, host_kv_bytes=host, disk_kv_bytes=disk, address=address)
    model = PagedModel(address, info, tokens)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _has(model.now(), tiers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no pages of {' and '.join(tiers)}, or not all pinned, after {PATIENCE_S:.0f} s")
            time.sleep(0.05)
        if djinn.status(address=address).devices[0].name != "cpu":
            model.quiet_s = QUIET_S
        with model.session() as session:
            session.generate(max_tokens=4, ignore_eos=True)
            time.sleep(model.quiet_s)
        yield model
    finally:
        model.close()
        djinn.unload(MODEL, force=True, address=address)
