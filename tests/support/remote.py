"""A real gateway that takes sessions from other machines, in front of a daemon."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme

from djinn_client.transport.remote.tls import fingerprint
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway


class RemoteGateway(Gateway):
    """`remote` and `http` are sections of its configuration. Its certificate is of its own authority, for 127.0.0.1."""

    READY = "gateway_remote_ready"

    def __init__(
        self,
        folder: Path,
        daemon: Daemon,
        remote: Mapping[str, Any] | None = None,
        errors: Collection[str] = (),
        http: Mapping[str, Any] | None = None,
    ) -> None:
        self.authority = trustme.CA()
        self.authority_file = folder / "authority.pem"
        self.authority.cert_pem.write_to_path(self.authority_file)
        certificate = self.authority.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(folder / "tls.pem")
        tls = {"certificate": str(folder / "tls.pem"), "key": str(folder / "tls.pem")}
        self._section = {"listen": "127.0.0.1:0"} | dict(remote or {})
        super().__init__(folder, daemon.address, tls | dict(http or {}), errors)

    def sections(self) -> dict[str, Any]:
        return {"remote": self._section}

    @property
    def port(self) -> int:
        found = re.search(r"gateway_remote_ready address=[\d.]+:(\d+)", self.log)
        assert found is not None
        return int(found[1])

    def address_for(self, token: str, port: int | None = None) -> str:
        """The address for a client that trusts this gateway's certificate by its fingerprint."""
        return f"djinns://{token}@127.0.0.1:{port or self.port}#{self.fingerprint}"

    @property
    def fingerprint(self) -> str:
        pem = (self._file.parent / "tls.pem").read_text()
        end = "-----END CERTIFICATE-----"
        begin = pem.index("-----BEGIN CERTIFICATE-----")
        return fingerprint(ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(end) + len(end)]))


def daemon_fixture() -> Callable[..., Any]:
    """A fixture for the tests of one file: a daemon that has loaded the model."""

    @pytest.fixture(scope="module")
    def daemon() -> Iterator[Daemon]:
        with DaemonStarter() as start:
            daemon = start()
            with daemon.client() as client:
                client.load(MODEL)
            yield daemon

    return daemon


def gateway_fixture(remote: Mapping[str, Any]) -> Callable[..., Any]:
    """A fixture for the tests of one file: a gateway in front of the fixture `daemon`."""

    @pytest.fixture(scope="module")
    def gateway(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteGateway]:
        with RemoteGateway(tmp_path_factory.mktemp("gateway"), daemon, remote) as gateway:
            yield gateway

    return gateway


def token_of(daemon: Daemon, name: str, user: str = "") -> str:
    """A new token. `user`: the Unix user that it stands for; "": it stands for its own name."""
    with daemon.client() as client:
        return client.add_token(name, user=user).token
