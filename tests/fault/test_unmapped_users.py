"""A daemon in a user namespace cannot tell unmapped users apart, and serves none of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support.other_user import as_user, only_root, open_to_all

NAMESPACE = ["unshare", "--user", "--map-root-user"]


@only_root
@pytest.mark.smoke
def test_an_unmapped_user_is_refused_and_others_are_served(start_daemon: DaemonStarter) -> None:
    if subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    daemon = start_daemon(wrapper=NAMESPACE)
    open_to_all(daemon.folder, daemon.address)
    with as_user(), pytest.raises(djinn.NotPermitted, match="user namespace that does not map your user"):
        djinn.status(address=daemon.address)
    assert djinn.status(address=daemon.address).state == "ready"
    assert "unmapped_user user=65534" in Path(daemon.log_path).read_text()
