"""Connections from other machines that break: each call has the result of an undisturbed one, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import djinn_client as djinn
from djinn_client.transport.remote import channel
from tests.conftest import MODEL
from tests.support.bad_proxy import HARMS, BadProxy, CuttingProxy, MutingProxy
from tests.support.daemon import Daemon, descriptors_of, expect_held, holdings, wait_for
from tests.support.remote import RemoteGateway, daemon_fixture, gateway_fixture, token_of

PROMPTS = [f"def f{n}(a, b):\n    return a " for n in range(6)]
TOKENS = [7, 20, 101, 300, 55]


daemon = daemon_fixture()
gateway = gateway_fixture({"grace": "8s"})


def generate(s: djinn.Session, n: int) -> Any:
    return s.generate(PROMPTS[n % len(PROMPTS)], max_tokens=4, ignore_eos=True).token_ids


def stream(s: djinn.Session, n: int) -> Any:
    return "".join(piece.text for piece in s.stream(PROMPTS[n % len(PROMPTS)], max_tokens=8, ignore_eos=True))


def forward(s: djinn.Session, n: int) -> Any:
    return s.forward(TOKENS[: 1 + n % len(TOKENS)]).tolist()


def capture(s: djinn.Session, n: int) -> Any:
    points = ["hook_embed", "blocks.4.hook_resid_post"]
    cache = s.capture(points).run(PROMPTS[n % len(PROMPTS)], max_tokens=1)
    return [np.asarray(cache[point]).tolist() for point in points]


def why(s: djinn.Session, n: int) -> Any:
    return s.why().state if n % 5 == 0 else s.token_ids()


CALLS: list[Callable[[djinn.Session, int], Any]] = [generate, stream, forward, capture, why]


def results(address: str, calls: int, seed: int) -> list[Any]:
    """Calls at random, each on a session without tokens, and returns their results; a typed error is None."""
    chosen = random.Random(seed)
    found: list[Any] = []
    with djinn.Session(MODEL, address=address) as s:
        for n in range(calls):
            call = chosen.choice(CALLS)
            try:
                found.append([call(s, n), s.token_ids()])
                s.truncate(0)
            except djinn.DjinnError:
                found.append(None)
    return found


def are_equal(found: Any, expected: Any) -> bool:
    """Numbers up to what depends on the shapes of a step."""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return all(map(are_equal, found, expected))
    if isinstance(found, float):
        return abs(found - expected) <= 1e-3 * (1 + abs(expected))
    return bool(found == expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("calls", "seed"),
    [pytest.param(25, 1, marks=pytest.mark.smoke), (250, 2)],
)
def test_calls_over_a_bad_network_have_the_results_of_undisturbed_ones(
    daemon: Daemon, gateway: RemoteGateway, calls: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PING_S", 0.5)  # a bent length makes TLS wait for bytes that come with a ping only
    expected = results(daemon.address, calls, seed)
    assert None not in expected
    token = token_of(daemon, f"bad-{seed}")
    before, descriptors = holdings(daemon), len(descriptors_of(gateway.process.pid))
    with BadProxy(gateway.port, seed, 0.03) as proxy:
        found = results(gateway.address_for(token, proxy.port), calls, seed)
        assert calls < 100 or set(HARMS) <= set(proxy.done), proxy.done
    wrong = [
        n
        for n, (got, wanted) in enumerate(zip(found, expected, strict=True))
        if got is not None and not are_equal(got, wanted)
    ]
    assert not wrong
    assert found.count(None) <= calls // 50, "a broken connection is continued"
    wait_for(lambda: len(descriptors_of(gateway.process.pid)) <= descriptors + 1)
    expect_held(daemon, before)


def test_a_call_continues_when_the_first_new_connections_are_not_answered(
    daemon: Daemon, gateway: RemoteGateway
) -> None:
    with MutingProxy(gateway.port) as proxy:
        with djinn.Session(MODEL, address=gateway.address_for(token_of(daemon, "muted"), proxy.port)) as s:
            expected = generate(s, 0)
            s.truncate(0)
            proxy.cut(muted=channel.ATTEMPTS - 2)
            assert generate(s, 0) == expected
        assert not proxy.muted


def test_uploads_and_downloads_that_are_cut_go_on_from_the_last_acknowledged_part(
    daemon: Daemon, gateway: RemoteGateway, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = [n % 128 for n in range(1024)]
    moved = 0

    def count(now: djinn.Progress) -> None:
        nonlocal moved
        if now.stage in ("sending", "receiving") and now.done == now.total:
            moved += now.total

    with CuttingProxy(gateway.port, every=4 << 20) as proxy:
        address = gateway.address_for(token_of(daemon, "cut"), proxy.port)
        with djinn.share_model(model, kv_bytes=64 << 20, address=address, on_progress=count) as handle:
            assert proxy.cuts >= 4, "the weights have 16 MiB"
            with djinn.Session(handle.name, address=address) as s:
                logits = s.forward(tokens, on_progress=count)
                kv = s.kv(on_progress=count)
                s.save(tmp_path / "session", kv=True, on_progress=count)
            with djinn.Session.load(tmp_path / "session", address=address, on_progress=count) as s:
                np.testing.assert_array_equal(s.kv(on_progress=count).pages, kv.pages)
    assert proxy.cuts >= 10 and moved < proxy.passed < 1.3 * moved
    expected = model(torch.tensor([tokens])).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
