"""Two hundred sessions of twenty processes at once, some of which die by SIGKILL during a stream. The others get the
same tokens as alone, and afterwards the daemon is as it was before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support import tenant
from tests.support.daemon import PATIENCE, ROOT, Daemon, clean_environ, expect_held, holdings

PROCESSES = 20
KILLED = 5
SESSIONS = 10  # of each process


@contextmanager
def process(daemon: Daemon, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.tenant", daemon.address, str(SESSIONS), *options]
    started = subprocess.Popen(
        command, cwd=ROOT, env=clean_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def hear(tenant: subprocess.Popen[str]) -> str:
    assert tenant.stdout is not None
    return tenant.stdout.readline().strip()


def go(tenant: subprocess.Popen[str]) -> None:
    assert tenant.stdin is not None
    tenant.stdin.write("go\n")
    tenant.stdin.flush()


def alone(daemon: Daemon, prompt: str) -> list[int]:
    with djinn.Session(MODEL, address=daemon.address) as s:
        return s.generate(prompt, max_tokens=tenant.TOKENS, ignore_eos=True).token_ids


def test_two_hundred_sessions_survive_the_death_of_others(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"session_grace": "0.5s"}})
    expected = [alone(daemon, prompt) for prompt in tenant.PROMPTS]
    before = holdings(daemon)
    assert before["findings"] == []

    with ExitStack() as stack:
        doomed = [stack.enter_context(process(daemon, "--endless")) for _ in range(KILLED)]
        others = [stack.enter_context(process(daemon)) for _ in range(PROCESSES - KILLED)]
        for one in doomed + others:
            assert hear(one) == "open"
        with daemon.client() as client:
            assert sum(client.status().sessions.values()) == PROCESSES * SESSIONS
        for one in doomed + others:
            go(one)
        for one in doomed:
            assert hear(one) == "streaming"
            one.kill()
        for one in others:
            answers = json.loads(hear(one))
            assert answers == [expected[place % len(expected)] for place in range(SESSIONS)]
            assert one.wait(PATIENCE) == 0

    expect_held(daemon, before)
