"""A journal that ends in mid-write: the changes committed before that are there in their order, and no others."""

from __future__ import annotations

import os
import random

import pytest

import djinn_client as djinn
from djinn_client import SessionNotFound
from tests.conftest import MODEL, DaemonStarter
from tests.support.lives import Lives

PROMPT = list(range(100, 140))
STORY, NEXT = 120, 4
SESSIONS = 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cuts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_cut_at_random_bytes(start_daemon: DaemonStarter, cuts: int) -> None:
    """Each session generates the same tokens, so any remaining part of a session is a beginning of them."""
    seed = int(os.environ.get("DJINND_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))
    print(f"seed {seed}")
    choice = random.Random(seed)
    lives = Lives(start_daemon, {"kv": "16MiB", "host_kv": "16MiB", "disk_kv": "16MiB"})
    with djinn.Session(MODEL, address=lives.address) as s:
        story = PROMPT + s.generate(PROMPT, max_tokens=STORY + NEXT, ignore_eos=True).token_ids
    for _ in range(cuts):
        names = []
        for _ in range(SESSIONS):
            session = djinn.Session(MODEL, address=lives.address)
            for piece in session.stream(PROMPT, max_tokens=STORY, ignore_eos=True):
                if piece.token_ids and choice.random() < 0.02:
                    break
            names.append(session.id)
            session.detach()
        lives.kill()
        log = lives.state / "journal.db-wal"
        os.truncate(log, choice.randrange(log.stat().st_size))
        lives.again()
        for name in names:
            try:
                session = djinn.Session.attach(name, address=lives.address)
            except SessionNotFound:
                continue  # it was opened after the cut
            with session:
                tokens = session.token_ids()
                assert tokens == story[: len(tokens)]
                prompt = [] if tokens else PROMPT
                length = len(tokens) + len(prompt)
                answer = session.generate(prompt or None, max_tokens=NEXT, ignore_eos=True)
                assert answer.token_ids == story[length : length + NEXT]
        assert djinn.status(check=True, address=lives.address).integrity == []
