"""A /dev/shm with too little room: loading a model gives an error with the figures, and never a SIGBUS."""

from __future__ import annotations

import subprocess

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.models import reduced_model

# In a mount namespace of the daemon's own, so that the /dev/shm of other processes does not change.
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh"]


def may_mount() -> bool:
    try:
        return subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_model_larger_than_shared_memory_is_refused(start_daemon: DaemonStarter) -> None:
    if not may_mount():
        pytest.skip("a mount namespace of one's own needs root, and a system that permits it")
    daemon = start_daemon(wrapper=SMALL_SHM, errors=["model_failed"])
    small = str(reduced_model("llama-2"))
    with djinn.Session(small, address=daemon.address) as s:
        before = s.generate([1, 2, 3], max_tokens=8, ignore_eos=True).token_ids
        with pytest.raises(djinn.OutOfMemory, match=r"/dev/shm has [\d,]+ free.*remount,size=") as caught:
            djinn.load(MODEL, address=daemon.address)
        assert caught.value.data["needed"] > 4 << 20 > caught.value.data["free"]
        s.truncate(0)
        assert s.generate([1, 2, 3], max_tokens=8, ignore_eos=True).token_ids == before
    assert djinn.status(check=True, address=daemon.address).integrity == []
