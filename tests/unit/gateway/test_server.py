from __future__ import annotations

from djinnd.config import Http
from djinnd.gateway.server import reloaded


def test_a_reload_takes_over_all_but_the_sockets_and_their_rights():
    held = Http(listen="127.0.0.1:1", socket="/a", loopback_without_token=True)
    wanted = Http(listen="127.0.0.1:2", socket="/b", body_bytes=5, cors=("https://a.example",))
    assert reloaded(held, wanted) == Http(
        listen="127.0.0.1:1", socket="/a", loopback_without_token=True, body_bytes=5, cors=("https://a.example",)
    )


def test_a_certificate_is_exchanged_but_neither_added_nor_removed():
    plain, first, second = Http(), Http(certificate="a", key="b"), Http(certificate="c", key="d")
    assert reloaded(first, second) == second
    assert reloaded(first, plain) == first
    assert reloaded(plain, first) == plain
