from __future__ import annotations

import os
import socket

import pytest

from djinnd.server.system.peers import Peer, unmapped_uid


def test_the_kernel_names_the_peer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert Peer.of(ours) == (os.getpid(), os.getuid())


@pytest.mark.parametrize(
    ("uid_map", "nobody"),
    [
        ("         0          0 4294967295\n", None),
        ("         0       1000          1\n", 65534),
        ("         0     100000      65536\n", 65534),
        ("         0       1000          1\n         1     100000      65536\n", 65534),
    ],
)
def test_the_overflow_uid_stands_for_unmapped_users(tmp_path, uid_map, nobody):
    (tmp_path / "map").write_text(uid_map)
    (tmp_path / "overflow").write_text("65534\n")
    assert unmapped_uid(tmp_path / "map", tmp_path / "overflow") == nobody
