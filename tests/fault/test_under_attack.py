"""While two users attack the daemon, a third gets every token, the same ones as alone, and the daemon stays small.

`python -m tests.fault.test_under_attack` prints how long each attack made the victim wait; tests assert no times.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.attacks import ATTACKS, Attack, run_as
from tests.support.daemon import Daemon
from tests.support.other_user import only_root, open_to_all
from tests.support.victim import Victim

ATTACKERS = (23001, 23002)
SECONDS = 10.0  # seconds that an attack may take; then its process is killed
SERVER_MIB = 400  # most growth of the server under any attack: docs/design/security.md


def peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def attack(daemon: Daemon, number: int, act: Attack) -> str:
    user = ATTACKERS[number % len(ATTACKERS)]
    with tempfile.TemporaryDirectory(prefix="djinnd-attacker-", dir="/tmp") as folder:
        os.chown(folder, user, user)
        return run_as(user, act, daemon.address, Path(folder), SECONDS)


@only_root
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_victim_gets_all_its_tokens_under_any_attack(start_daemon):
    daemon = start_daemon({"memory": "4GiB"}, errors=["model_failed"])
    open_to_all(daemon.folder, daemon.address)
    before = peak_mib(daemon.pid)
    victim = Victim(daemon.address)
    try:
        for number, act in enumerate(ATTACKS):
            attack(daemon, number, act)
            assert victim.error is None, f"{act.__name__}: {victim.error!r}"
    finally:
        victim.stop()
    assert victim.error is None, repr(victim.error)
    assert victim.calls > 0
    assert daemon.process.poll() is None
    assert "engine_lost" not in daemon.log
    assert peak_mib(daemon.pid) - before < SERVER_MIB


def main() -> int:
    """Prints the longest pause for each attack."""
    from tests.conftest import DaemonStarter

    names = sys.argv[1:]
    worst = 0.0
    with DaemonStarter() as start:
        daemon = start({"memory": "4GiB"}, errors=["model_failed"])
        open_to_all(daemon.folder, daemon.address)
        victim = Victim(daemon.address)
        try:
            for number, act in enumerate(ATTACKS):
                if names and act.__name__ not in names:
                    continue
                victim.longest, before = 0.0, peak_mib(daemon.pid)
                told = attack(daemon, number, act)
                longest = victim.longest * 1e3
                worst = max(worst, longest)
                grown = peak_mib(daemon.pid) - before
                error = f" VICTIM: {victim.error!r}" if victim.error else ""
                print(
                    f"{act.__name__:30} pause {longest:7.1f} ms  server +{grown:4} MiB{error}  ({told[:100]})",
                    flush=True,
                )
        finally:
            victim.stop()
    print(f"longest pause {worst:.0f} ms, {victim.calls} calls, error {victim.error!r}")
    return 1 if victim.error else 0


if __name__ == "__main__":
    sys.exit(main())
