"""Addresses of daemons on other machines, and the file in which a user gives them names.

djinns://gpu1.example.org:5556                        certified by an authority that this machine trusts
djinns://djn_TOKEN@gpu1.example.org#sha256:HEX        with a token, and the fingerprint of its certificate
gpu1                                                  a name in ~/.config/djinn/client.toml:

    default = "gpu1"                                  used where no address is given

    [hosts.gpu1]
    address = "djinns://gpu1.example.org:5556"
    fingerprint = "sha256:HEX"                        or: ca = "/path/of/authority.pem"
    token = "djn_TOKEN"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.transport.address import ENVIRONMENT, TOKEN_VARIABLE, hosts_file, without_token

SCHEME = "djinns"
PORT = 5556
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the file."""

    address: str
    token: str = ""
    fingerprint: str = ""
    ca: str = ""


class Hosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    default: str = ""
    hosts: dict[str, Host] = {}


class RemoteAddress(NamedTuple):
    """`fingerprint`: "sha256:" and 64 hexadecimal digits of the certificate, or "". `ca`: the file of a certificate
    authority, or ""; without either, the machine's own authorities certify the host."""

    host: str
    port: int
    token: str = ""
    fingerprint: str = ""
    ca: str = ""

    def __str__(self) -> str:
        """Without the token, for messages."""
        return f"{SCHEME}://{self._place}"

    @property
    def url(self) -> str:
        """With the token and the fingerprint."""
        token = f"{self.token}@" if self.token else ""
        pinned = f"#{self.fingerprint}" if self.fingerprint else ""
        return f"{SCHEME}://{token}{self._place}{pinned}"

    @property
    def _place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_hosts(path: Path) -> Hosts:
    """The file's content; empty if there is no file. Raises InvalidRequest."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Hosts()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    try:
        hosts = msgspec.convert(tomllib.loads(text), Hosts)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if any(host.token for host in hosts.hosts.values()) and path.stat().st_mode & 0o077:
        raise InvalidRequest(f"{path} has tokens, and others may read it: chmod 600 {path}")
    return hosts


def remote_address(address: str | None, environ: Mapping[str, str] = os.environ) -> RemoteAddress | None:
    """The daemon of another machine that the address means: a URL, a name in the file, or, without an address, the
    file's default. None if it means a Unix socket. Raises InvalidRequest."""
    if address is not None and address.startswith(f"{SCHEME}://"):
        return parse(address)
    if address is not None and "/" in address:
        return None
    hosts = read_hosts(hosts_file(environ))
    name = address or hosts.default
    if name not in hosts.hosts:
        if address is None and name:
            raise InvalidRequest(f"{hosts_file(environ)}: the default is {name!r}, and no host has this name")
        return None
    host = hosts.hosts[name]
    given = parse(host.address)
    return given._replace(
        token=host.token or given.token, fingerprint=_checked(host.fingerprint or given.fingerprint), ca=host.ca
    )


def token_for(remote: RemoteAddress, environ: Mapping[str, str] = os.environ) -> str:
    """The token that comes with the address, or $DJINND_TOKEN; "" if there is none. A machine that is sent a token can
    use it, so $DJINND_TOKEN goes only to the daemon of $DJINND_ADDRESS, if that is set. Raises InvalidRequest."""
    if remote.token:
        return remote.token
    if named := environ.get(ENVIRONMENT):
        meant = remote_address(named, environ)
        if meant is None or (meant.host, meant.port) != (remote.host, remote.port):
            return ""
    return environ.get(TOKEN_VARIABLE, "")


def parse(url: str) -> RemoteAddress:
    """Raises InvalidRequest."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or PORT
    except ValueError as error:
        raise InvalidRequest(f"{without_token(url)[:200]} is no address: {error}") from error
    if parts.scheme != SCHEME or not host or parts.path.strip("/") or parts.query or parts.password:
        raise InvalidRequest(
            f"{without_token(url)[:200]} is no address: write {SCHEME}://HOST:PORT, as in {SCHEME}://gpu1:{PORT}"
        )
    return RemoteAddress(host, port, parts.username or "", _checked(parts.fragment))


def _checked(fingerprint: str) -> str:
    """Raises InvalidRequest."""
    wanted = fingerprint.lower()
    if wanted and not _FINGERPRINT.fullmatch(wanted):
        raise InvalidRequest(f"{fingerprint[:100]!r} is no fingerprint: it is sha256: and 64 hexadecimal digits")
    return wanted


def remember(name: str, host: Host, path: Path) -> None:
    """Writes a host into the file, in the place of one with this name. The first host becomes the default. Only the
    user may read the file. Raises InvalidRequest, OSError."""
    known = read_hosts(path)
    hosts = Hosts(known.default or name, {**known.hosts, name: host})
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(as_toml(hosts))
    new.replace(path)


def as_toml(hosts: Hosts) -> str:
    """The file's text."""
    lines = [f"default = {_quoted(hosts.default)}", ""] if hosts.default else []
    for name, host in hosts.hosts.items():
        lines.append(f"[hosts.{_quoted(name)}]")
        fields: dict[str, Any] = msgspec.structs.asdict(host)
        lines += [f"{field} = {_quoted(value)}" for field, value in fields.items() if value]
        lines.append("")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A JSON string is a basic string of TOML."""
    return msgspec.json.encode(text).decode()
