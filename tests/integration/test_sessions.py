"""Sessions beyond one connection: left, found again by another process, and gone when nobody comes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import ROOT, Daemon, clean_environ, wait_for

GO_ON = """
import json, sys
import djinn_client as djinn
s = djinn.attach(sys.argv[1])
print(json.dumps([s.token_ids, s.generate(max_tokens=16, ignore_eos=True).token_ids]))
s.detach()
"""


def test_another_process_goes_on(daemon: Daemon) -> None:
    with djinn.Session(MODEL, address=daemon.address) as s:
        whole = s.generate("import ", max_tokens=48, ignore_eos=True).token_ids
    mine = djinn.Session(MODEL, address=daemon.address)
    mine.generate("import ", max_tokens=16, ignore_eos=True)
    tokens = mine.token_ids
    mine.detach()
    environ = clean_environ() | {"DJINND_ADDRESS": daemon.address}
    other = subprocess.run(
        [sys.executable, "-c", GO_ON, mine.id], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert other.returncode == 0, other.stderr
    assert json.loads(other.stdout) == [tokens, whole[16:32]]
    with djinn.attach(mine.id, address=daemon.address) as again:
        assert again.token_ids == [*tokens, *whole[16:32]]
        assert again.generate(max_tokens=16, ignore_eos=True).token_ids == whole[32:]
    with pytest.raises(djinn.SessionNotFound):
        djinn.attach(mine.id, address=daemon.address)


def test_a_session_that_nobody_comes_back_to(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"session_grace": "1s"}})
    with djinn.Session(MODEL, address=daemon.address) as kept, daemon.client() as client:
        kept.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        left = djinn.Session(MODEL, address=daemon.address)
        left.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        left.detach()
        wait_for(lambda: [info.id for info in client.sessions()] == [kept.id])
        assert [model.pages_used for model in client.models()] == [1]
        with pytest.raises(djinn.SessionNotFound):
            djinn.attach(left.id, address=daemon.address)
        assert len(kept.generate(max_tokens=4, ignore_eos=True).token_ids) == 4
        assert client.status(check=True).integrity == []
