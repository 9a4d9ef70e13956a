"""Figures of the links from other machines, and of refused tokens, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from djinn_client.errors import Busy, NotAuthenticated, ProtocolError, QuotaExceeded
from djinn_client.transport.remote.carrier import Carrier
from djinnd.gateway.daemon.refused_tokens import RefusedTokens

NO_HELLO = "no_hello"  # nothing came in time, or the connection broke before


class Figures(Collector):
    """The door and its relays count in here. `refused_links`: by the code of the error, or NO_HELLO."""

    def __init__(self, refused_tokens: RefusedTokens) -> None:
        self.links = 0
        self.window_bytes = 0  # of windows that clients are sending
        self.failed_handshakes = 0
        self.refused_links = Counter(
            dict.fromkeys((NO_HELLO, Busy.code, NotAuthenticated.code, ProtocolError.code, QuotaExceeded.code), 0)
        )
        self._refused_tokens = refused_tokens
        self._carriers: set[Carrier] = set()  # of links, open
        self._sent = self._received = 0  # bytes of carriers that are closed

    def connected(self, carrier: Carrier) -> None:
        """A link has got a TLS connection."""
        self._carriers.add(carrier)

    def disconnected(self, carrier: Carrier) -> None:
        self._carriers.discard(carrier)
        self._sent += carrier.given
        self._received += carrier.taken

    def collect(self) -> Iterator[Metric]:
        links = GaugeMetricFamily("djinnd_remote_links", "Links of clients on other machines.", labels=["state"])
        links.add_metric(["connected"], len(self._carriers))
        links.add_metric(["waiting"], self.links - len(self._carriers))
        yield links
        passed = CounterMetricFamily("djinnd_remote_bytes", "Bytes of links, inside TLS.", labels=["direction"])
        passed.add_metric(["received"], self._received + sum(carrier.taken for carrier in self._carriers))
        passed.add_metric(["sent"], self._sent + sum(carrier.given for carrier in self._carriers))
        yield passed
        refused = CounterMetricFamily(
            "djinnd_remote_refused_links", "Links that were refused, by the error's code.", labels=["reason"]
        )
        for reason, count in self.refused_links.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            "djinnd_remote_window_bytes", "Memory of windows that clients are sending.", self.window_bytes
        )
        yield CounterMetricFamily(
            "djinnd_remote_failed_handshakes", "TLS handshakes that did not come to an end.", self.failed_handshakes
        )
        yield CounterMetricFamily(
            "djinnd_refused_tokens", "Requests and links with a token that was refused.", self._refused_tokens.count
        )
