"""Deaths at any moment: the next daemon has the sessions, and their next tokens are the same as without the death.

The model is djinn-tiny on the CPU, in float32, with one row per step: recomputing does not change its tokens.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import JournalUnavailable, SessionNotFound
from djinnd.server.journal.journal import RETRY
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, wait_for

PROMPT = [100, 101, 102, 103, 104]
TOKENS = 60
KILLS = 2
PAGE = 4096  # bytes; a page in the journal's log takes some more


def successor_of(daemon: Daemon, start_daemon: DaemonStarter) -> Daemon:
    """The successor of a killed daemon, at the same address."""
    next_ = start_daemon({"socket": daemon.address, "state_dir": f"{Path(daemon.address).parent}/state"})
    next_.address = daemon.address
    return next_


@pytest.mark.parametrize(
    ("engine_too", "sampling"),
    [(False, {}), (True, {"temperature": 1.0, "seed": 7, "top_p": 0.9})],
    ids=["the daemon, greedy", "both, seeded"],
)
def test_killed_in_mid_stream(start_daemon: DaemonStarter, engine_too: bool, sampling: dict[str, float]) -> None:
    daemon = start_daemon()
    with djinn.Session(MODEL, address=daemon.address) as s:
        expected = s.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, **sampling).token_ids
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    session = djinn.Session(MODEL, address=daemon.address)
    prompt: list[int] = PROMPT
    told: list[int] = []
    for _ in range(KILLS):
        wanted = moments.randint(1, 12)
        stream = session.stream(prompt, max_tokens=TOKENS - len(told), ignore_eos=True, **sampling)
        heard = []
        for piece in stream:
            heard += piece.token_ids
            if len(heard) >= wanted:
                break
        if engine_too:
            daemon.kill_engine()
        daemon.kill()
        session.detach()
        told += heard
        daemon = successor_of(daemon, start_daemon)
        session = djinn.Session.attach(session.id, address=daemon.address)
        tokens = session.token_ids()
        assert tokens[: len(PROMPT) + len(told)] == PROMPT + told, "the client has received these tokens"
        told, prompt = tokens[len(PROMPT) :], []
        assert told == expected[: len(told)]
    told += session.generate(max_tokens=TOKENS - len(told), ignore_eos=True, **sampling).token_ids
    assert told == expected
    session.close()
    with djinn.Client(daemon.address) as client:
        assert client.status(check=True).integrity == []


@pytest.mark.smoke
def test_closed_and_cut_sessions_stay_so(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    cut, closed = (djinn.Session(MODEL, address=daemon.address) for _ in range(2))
    for session in (cut, closed):
        session.generate(PROMPT, max_tokens=10, ignore_eos=True)
    logits = cut.forward([7, 8])
    cut.truncate(9)
    tokens, forked = cut.token_ids(), cut.fork()
    forked.generate([9], max_tokens=2, ignore_eos=True)
    grown = forked.token_ids()
    closed.close()
    daemon.kill()
    cut.detach()
    forked.detach()
    daemon = successor_of(daemon, start_daemon)
    assert logits.shape[0] == 2
    with pytest.raises(SessionNotFound):
        djinn.Session.attach(closed.id, address=daemon.address)
    with (
        djinn.Session.attach(cut.id, address=daemon.address) as one,
        djinn.Session.attach(forked.id, address=daemon.address) as two,
    ):
        assert (one.token_ids(), two.token_ids()) == (tokens, grown)
        assert (one.info.state, one.info.model) == ("idle", MODEL)


def test_a_full_disk(start_daemon: DaemonStarter) -> None:
    """A limit on the size of the daemon's files stands for the disk: even an empty log has no room for one page."""
    daemon = start_daemon({"log": {"level": "error"}}, errors=["journal_failed"])
    with djinn.Session(MODEL, address=daemon.address) as s:
        expected = s.generate(PROMPT, max_tokens=200, ignore_eos=True).token_ids
    with djinn.Session(MODEL, address=daemon.address) as session:
        stream = session.stream(PROMPT, max_tokens=200, ignore_eos=True)
        heard = list(next(stream).token_ids)
        unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (PAGE, unlimited[1]))
        heard += [token for piece in stream for token in piece.token_ids]
        assert heard == expected, "requests under way continue"
        wait_for(lambda: "journal_failed" in daemon.log)
        for _ in range(2):
            refused(lambda: open_one(daemon))
            refused(lambda: session.generate([1], max_tokens=1))
            time.sleep(1.5 * RETRY)  # the journal has tried again in vain
        assert session.token_ids() == PROMPT + expected

        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
        wait_for(lambda: is_admitted(daemon))
        with djinn.Session(MODEL, address=daemon.address) as s:
            assert s.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids == expected[:5]
        daemon.kill()
        session.detach()
    daemon = successor_of(daemon, start_daemon)
    with djinn.Session.attach(session.id, address=daemon.address) as s:
        assert s.token_ids() == PROMPT + expected, "failed writes are tried again"


def open_one(daemon: Daemon) -> None:
    with djinn.Session(MODEL, address=daemon.address):
        pass


def refused(ask: Callable[[], object]) -> None:
    with pytest.raises(JournalUnavailable, match=r"journal\.db: .*no new work is accepted") as caught:
        ask()
    assert caught.value.data["path"].endswith("journal.db")


def is_admitted(daemon: Daemon) -> bool:
    try:
        open_one(daemon)
    except JournalUnavailable:
        return False
    return True


def test_the_state_directory_of_a_running_daemon_is_refused(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    other = start_daemon({"state_dir": str(daemon.folder / "state")}, ready=False)
    assert other.wait() == 1
    assert "is the state directory of a daemon that runs" in other.log and "Traceback" not in other.log
    with djinn.Session(MODEL, address=daemon.address) as s:
        s.generate(PROMPT, max_tokens=2)


def test_the_engine_dies_and_then_the_daemon(start_daemon: DaemonStarter) -> None:
    """A stream continues on the next engine, and the journal has all tokens that were sent."""
    daemon = start_daemon(errors=["engine_lost"])
    session = djinn.Session(MODEL, address=daemon.address)
    session.generate(PROMPT, max_tokens=10, ignore_eos=True)
    tokens = [*session.token_ids(), 1, 2]
    stream = session.stream([1, 2], max_tokens=1900, ignore_eos=True)
    tokens += next(stream).token_ids
    os.kill(daemon.device().pid, signal.SIGKILL)
    wait_for(lambda: daemon.device().restarts == 1)
    for _ in range(20):
        tokens += next(stream).token_ids
    daemon.kill()
    with suppress(djinn.ConnectionLost):
        for piece in stream:
            tokens += piece.token_ids
    session.detach()
    daemon = successor_of(daemon, start_daemon)
    with djinn.Session.attach(session.id, address=daemon.address) as s:
        kept = s.token_ids()
        assert kept[: len(tokens)] == tokens
