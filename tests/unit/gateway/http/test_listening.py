from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from djinnd.config import Http
from djinnd.gateway.http.listening import ListenError, expect_safe, host_and_port, load_certificate, tls


def test_addresses():
    assert host_and_port("127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_and_port("[::1]:8443") == ("::1", 8443)
    for wrong in ("8000", "host", "host:", "host:x", "host:70000", ":80"):
        with pytest.raises(ListenError):
            host_and_port(wrong)


def test_no_listening_beyond_loopback_without_tls():
    for host in ("127.0.0.1", "::1", "localhost"):
        expect_safe(host, Http())
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ListenError, match=r"http\.certificate"):
            expect_safe(host, Http())
        expect_safe(host, Http(certificate="c", key="k"))


def test_a_certificate_without_its_key_leaves_the_one_that_is_there(tmp_path: Path):
    issued = [trustme.CA().issue_cert("localhost") for _ in range(2)]
    for number, each in enumerate(issued):
        each.cert_chain_pems[0].write_to_path(tmp_path / f"chain{number}")
        each.private_key_pem.write_to_path(tmp_path / f"key{number}")
    first = Http(certificate=str(tmp_path / "chain0"), key=str(tmp_path / "key0"))
    context = tls(first, "http/1.1", ssl.TLSVersion.TLSv1_2)
    assert context is not None
    with pytest.raises(ListenError, match="mismatch"):
        load_certificate(context, Http(certificate=str(tmp_path / "chain1"), key=str(tmp_path / "key0")))
    assert served_by(context) == served_by(tls(first, "http/1.1", ssl.TLSVersion.TLSv1_2))


def served_by(context: ssl.SSLContext | None) -> bytes | None:
    """The certificate that a client sees."""
    assert context is not None
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = anyone.wrap_bio(to_client, to_server)
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True)
