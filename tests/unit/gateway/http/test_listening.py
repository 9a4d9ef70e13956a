from __future__ import annotations

import pytest

from djinnd.config import Http
from djinnd.gateway.http.listening import StartError, expect_safe, host_and_port


def test_addresses():
    assert host_and_port("127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_and_port("[::1]:8443") == ("::1", 8443)
    for wrong in ("8000", "host", "host:", "host:x", "host:70000", ":80"):
        with pytest.raises(StartError):
            host_and_port(wrong)


def test_no_listening_beyond_loopback_without_tls():
    for host in ("127.0.0.1", "::1", "localhost"):
        expect_safe(host, Http())
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(StartError, match=r"http\.certificate"):
            expect_safe(host, Http())
        expect_safe(host, Http(certificate="c", key="k"))
