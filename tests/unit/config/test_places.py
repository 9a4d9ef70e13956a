from __future__ import annotations

import os

import pytest

from djinnd.config.places import default_socket, default_state_dir


def test_the_system_s_socket_where_this_user_may_make_it(tmp_path):
    system = tmp_path / "djinnd" / "djinnd.sock"
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, system) == str(system)
    system.parent.mkdir()
    assert default_socket({}, system) == str(system)


def test_the_user_s_own_socket_elsewhere(tmp_path):
    system = tmp_path / "not" / "there" / "djinnd.sock"
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, system) == "/run/user/7/djinnd/djinnd.sock"
    assert default_socket({}, system) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_system_folder_without_write_permission_is_not_used(tmp_path):
    tmp_path.chmod(0o500)
    system = tmp_path / "djinnd" / "djinnd.sock"
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, system) == "/run/user/7/djinnd/djinnd.sock"


def test_the_state_folder_is_systemd_s_or_the_system_s_or_the_user_s(tmp_path):
    nowhere = tmp_path / "not" / "there"
    assert default_state_dir({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, nowhere) == "/var/lib/a"
    assert default_state_dir({}, tmp_path / "djinnd") == str(tmp_path / "djinnd")
    assert default_state_dir({"XDG_STATE_HOME": "/s"}, nowhere) == "/s/djinnd"
    assert default_state_dir({"HOME": "/home/me"}, nowhere) == "/home/me/.local/state/djinnd"
