"""One model in a daemon of one's own, whose page pool has a known size, so that what has left the device has left it.

Pages keep their bytes when a session gives them up, and are found again as long as nobody else has been given them. A
bench that wants a session to come back from a lower tier has to have all of the pool written over meanwhile.
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
QUIET_S = 2.0  # in which a daemon on a GPU captures the graphs that steps have asked for
SPARE = 64  # tokens that a session gets beside its context
LIMITS = {"sessions": 8192, "sessions_per_user": 8192, "connections_per_user": 8192}


def without_text(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint in links, but for its tokenizer."""
    bare = folder / checkpoint.name
    bare.mkdir()
    for pattern in FILES:
        for file in checkpoint.glob(pattern):
            (bare / file.name).symlink_to(file.resolve())
    return bare


def daemon_of(
    checkpoint: Path, device: str, memory: str, settings: Mapping[str, Any], folder: Path | None, **others: Any
) -> AbstractContextManager[str]:
    """The address of a daemon that knows the model `MODEL`, with these settings, and has not loaded it. Its state is
    below `folder`; None: where temporary files are. `others`: what else its configuration says."""
    model = {"path": str(checkpoint), **settings}
    config = {"device": device, "memory": memory, "limits": LIMITS, "models": {MODEL: model}, **others}
    return private_daemon(config, folder)


class PagedModel:
    """The loaded model. `tokens`: of a session's prompt, so that its KV begins to fill one more page."""

    def __init__(self, address: str, info: djinn.ModelInfo, tokens: int) -> None:
        self.address = address
        self.info = info
        self.tokens = min(tokens, info.max_context - SPARE)
        self._client = djinn.Client(address)
        self.quiet_s = 0.0  # after the first steps of a kind, until later ones are as fast as they will be
        self._seeds = count(int.from_bytes(info.fingerprint[:2].encode(), "big"))

    @property
    def session_pages(self) -> int:
        """That a session may come to."""
        return -(-(self.tokens + SPARE) // self.info.page_size)

    def pool_bytes(self, *tokens: int) -> int:
        """Of a pool that sessions of so many tokens fill, and what they may come to."""
        pages = sum(-(-(one + SPARE) // self.info.page_size) for one in tokens)
        return (pages + 1) * self.info.page_bytes

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        return prompt(tokens, self.info.vocab, next(self._seeds))

    def session(self, tokens: int = 0) -> djinn.Session:
        """With the KV of a prompt of so many tokens (0: as all), and one token that has none yet."""
        session = djinn.Session(MODEL, address=self.address)
        session.generate(self.prompt(tokens or self.tokens), max_tokens=1, ignore_eos=True)
        return session

    def overwrite(self) -> None:
        """Every page that no session holds is given to somebody else, filled, and free again. A pool gives full pages
        last, and of those first what was free first: so none is filled twice before all have been."""
        size = self.info.page_size
        most = min(self.session_pages, (self.info.max_context - 1) // size)
        now = self.now()
        for _ in range(0, now.pages - now.pages_used, most):
            self.session(most * size).close()

    def now(self) -> djinn.ModelInfo:
        """Its figures."""
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
    """These tiers, as fast as they will be."""
    return all(getattr(info, f"{tier}_pages") for tier in tiers) and info.host_pages_pinned == info.host_pages


@contextmanager
def loaded(address: str, tokens: int, kv_bytes: int = 0, tiers: Sequence[Tier] = ()) -> Iterator[PagedModel]:
    """The model with a pool of so many bytes (0: as the daemon sees fit), and with these lower tiers, as they are
    configured, and no others; when the host's pages are pinned. Unloaded afterwards."""
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
