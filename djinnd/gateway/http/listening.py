"""Opens the sockets that the gateway listens at, and loads its certificate."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from pathlib import Path

from djinnd.config import Http, Remote
from djinnd.gateway.http.addresses import is_loopback

BACKLOG = 1024


class ListenError(Exception):
    """Why the gateway cannot start, and what to do."""


def listeners(http: Http) -> list[socket.socket]:
    """The TCP socket and the Unix socket, as far as they are configured. Raises ListenError."""
    found = []
    if http.listen:
        host, port = host_and_port(http.listen)
        expect_safe(host, http)
        found.append(_tcp(host, port))
    if http.socket:
        found.append(_unix(http.socket, 0o177 if http.loopback_without_token else 0o117))
    return found


def remote_listener(remote: Remote, http: Http) -> socket.socket | None:
    """The socket for sessions from other machines, if it is configured. Raises ListenError."""
    if not remote.listen:
        return None
    if not http.certificate:
        raise ListenError("remote.listen needs TLS: set http.certificate and http.key")
    return _tcp(*host_and_port(remote.listen))


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ListenError."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"{address!r} is no address: write HOST:PORT, as in 127.0.0.1:8000 or [::]:8443")
    return host, int(port)


def expect_safe(host: str, http: Http) -> None:
    """Raises ListenError for an address that others reach without TLS: their tokens would pass in the clear."""
    if not is_loopback(host) and not http.certificate:
        raise ListenError(
            f"{host} can be reached from other machines, and without TLS tokens would pass in the clear: set "
            "http.certificate and http.key, or listen at 127.0.0.1 behind a proxy that ends TLS"
        )


def tls(http: Http, protocol: str, least: ssl.TLSVersion) -> ssl.SSLContext | None:
    """`protocol`: the one that ALPN announces. None without a certificate. Raises ListenError."""
    if not http.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = least
    context.set_alpn_protocols([protocol])
    load_certificate(context, http)
    return context


def load_certificate(context: ssl.SSLContext, http: Http) -> None:
    """Loads the certificate, also into a context in use: later connections have the new one. Raises ListenError, and
    then leaves the context as it is, because with a new chain and an old key no handshake would succeed. A key with a
    passphrase is an error: a service cannot ask for it."""
    try:
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            each.load_cert_chain(http.certificate, http.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ListenError(f"http.certificate {http.certificate} with http.key {http.key}: {error}") from error


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        return sock
    except OSError as error:
        raise ListenError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


def _unix(path: str, umask: int) -> socket.socket:
    """`umask` leaves the socket to its owner, or to its group as well. The file of a socket without a listener is
    replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(umask)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(BACKLOG)
        return sock
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if is_socket and probe.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
