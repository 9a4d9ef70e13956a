"""Addresses of daemons on other machines, and the file with their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.transport.address import may_be_remote
from djinn_client.transport.remote.hosts import (
    PORT,
    Host,
    Hosts,
    RemoteAddress,
    as_toml,
    parse,
    read_hosts,
    remote_address,
    token_for,
)

PRINT = "sha256:" + "ab" * 32


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "djinn" / "client.toml"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("djinns://gpu1", RemoteAddress("gpu1", PORT)),
        ("djinns://gpu1:7000", RemoteAddress("gpu1", 7000)),
        ("djinns://[::1]:7000/", RemoteAddress("::1", 7000)),
        (
            f"djinns://djn_aB-_9@gpu1#{PRINT.upper().replace('SHA', 'sha')}",
            RemoteAddress("gpu1", PORT, "djn_aB-_9", PRINT),
        ),
    ],
)
def test_urls(url: str, address: RemoteAddress) -> None:
    assert parse(url) == address


@pytest.mark.parametrize(
    "url",
    ["djinns://", "djinns://gpu1:0x1", "djinns://gpu1/path", "djinns://gpu1?a=b", "djinns://a:b@gpu1", "http://gpu1",
     "djinns://gpu1#sha256:12", "djinns://gpu1:99999", f"djinns://gpu1#{PRINT}0"],
)  # fmt: skip
def test_an_address_in_another_form_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(url)


def test_errors_and_messages_do_not_show_the_token() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse("djinns://djn_secret@gpu1/path")
    assert "djn_secret" not in caught.value.message
    assert str(RemoteAddress("::1", 1, "djn_secret")) == "djinns://[::1]:1"


def test_names_of_the_file(file: Path) -> None:
    hosts = Hosts("gpu1", {"gpu1": Host("djinns://10.0.0.1", "djn_x", PRINT), "b c": Host("djinns://b", ca="/ca.pem")})
    file.write_text(as_toml(hosts))
    file.chmod(0o600)
    assert read_hosts(file) == hosts
    first = RemoteAddress("10.0.0.1", PORT, "djn_x", PRINT)
    assert remote_address("gpu1") == first
    assert remote_address(None) == first, "the default"
    assert remote_address("b c") == RemoteAddress("b", PORT, ca="/ca.pem")
    assert remote_address("djinns://c") == RemoteAddress("c", PORT)


def test_an_unknown_name_and_a_path_are_addresses_of_sockets(file: Path) -> None:
    file.write_text(as_toml(Hosts("", {"gpu1": Host("djinns://10.0.0.1")})))
    for address in ("gpu2", "/run/djinnd.sock", "./gpu1", None):
        assert remote_address(address) is None


def test_the_environment_s_token_goes_to_the_environment_s_daemon_only(file: Path) -> None:
    gpu1, gpu2 = RemoteAddress("gpu1", PORT), RemoteAddress("gpu2", PORT)
    file.write_text(as_toml(Hosts("", {"first": Host("djinns://gpu1")})))
    environ = {"XDG_CONFIG_HOME": str(file.parent.parent), "DJINND_TOKEN": "djn_environ"}
    assert token_for(gpu2, environ) == "djn_environ"
    assert token_for(gpu2._replace(token="djn_own"), environ) == "djn_own"
    for named in ("djinns://gpu1", "djinns://djn_x@gpu1:5556", "first"):
        assert token_for(gpu1, environ | {"DJINND_ADDRESS": named}) == "djn_environ"
        assert token_for(gpu2, environ | {"DJINND_ADDRESS": named}) == ""
    assert token_for(gpu1, environ | {"DJINND_ADDRESS": "/run/djinnd/djinnd.sock"}) == ""
    assert token_for(gpu1, {}) == ""


def test_without_a_file_only_urls_and_names_may_be_remote(file: Path) -> None:
    assert [may_be_remote(each) for each in (None, "/a/socket", "djinns://gpu1", "gpu1")] == [False, False, True, True]
    file.touch()
    assert may_be_remote(None)


def test_a_default_without_a_host_is_refused(file: Path) -> None:
    file.write_text('default = "gpu1"')
    with pytest.raises(InvalidRequest, match="no host has this name"):
        remote_address(None)


@pytest.mark.parametrize("text", ["default = 1", "[hosts.a]\nadress = 'x'", "= no toml"])
def test_a_file_with_mistakes_is_refused_by_its_name(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"client\.toml"):
        read_hosts(file)


def test_a_file_with_tokens_that_others_may_read_is_refused(file: Path) -> None:
    file.write_text(as_toml(Hosts("", {"a": Host("djinns://a", "djn_x")})))
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_hosts(file)
