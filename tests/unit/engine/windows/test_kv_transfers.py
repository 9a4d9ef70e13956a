"""KV exported from the engine and imported into it, in windows."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from djinn_client.handover.kv import KvWindow
from djinnd import messages
from djinnd.engine.windows.window import Window
from tests.support import reference
from tests.support.descriptors import open_descriptors
from tests.support.exporting import SALT, filled
from tests.support.exporting import ExportingEngine as Engine
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model
from tests.support.tiered import Tiered

VOCAB = 512
FOLDER = reduced_model("llama-2")
NEW = 8


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with llama-2 as "m"."""
    with Engine() as engine:
        engine.loaded(FOLDER)
        yield engine


@pytest.fixture
def small() -> Iterator[Engine]:
    """An engine whose pool has room for 512 tokens and a few more."""
    with Engine() as engine:
        engine.loaded(FOLDER, kv_bytes=1)
        yield engine


def cache_of_transformers(tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """K and V of each block, [tokens, kv_heads, head_dim], computed by transformers."""
    with torch.inference_mode():
        cache = reference.model_of(FOLDER)(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def test_exported_kv_equals_the_cache_of_transformers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces, and for all tokens. The last token's KV had not been computed before."""
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 1)
    engine.open("s")
    tokens = prompt(300) + engine.tokens("s", prompt(300), NEW)
    kv = engine.export("s")
    assert kv.length == len(tokens) == 308
    assert kv.pages.shape == engine.layout.shape(308)
    for block, (key, value) in enumerate(cache_of_transformers(tokens)):
        torch.testing.assert_close(kv.key(block), key, rtol=0, atol=1e-4)
        torch.testing.assert_close(kv.value(block), value, rtol=0, atol=1e-4)
    assert engine.tokens("s", [], NEW) == reference.greedy(FOLDER, tokens, NEW)
    engine.report()


def test_missing_kv_is_computed_before_the_export(engine: Engine) -> None:
    engine.open("s", tokens=prompt(70))
    kv = engine.export("s")
    assert kv.length == 70
    torch.testing.assert_close(kv.key(2), cache_of_transformers(prompt(70))[2][0], rtol=0, atol=1e-4)


def test_other_sessions_run_during_a_copy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 1)
    for name in ("s", "t"):
        engine.open(name)
    engine.tokens("s", prompt(300), NEW)
    running, exporting = engine.run_message("t", prompt(20), 40), messages.ExportKv(engine.number(), "s")
    engine.send(running, exporting)
    outcomes = engine.outcomes([running.request, exporting.request])
    assert outcomes[running.request][0] == reference.greedy(FOLDER, prompt(20), 40)
    assert isinstance(outcomes[exporting.request][1], messages.KvExported)
    engine.report()


@pytest.mark.parametrize("length", [5, 255, 256, 257, 300])
def test_a_session_goes_on_from_imported_kv(engine: Engine, length: int) -> None:
    engine.open("s")
    engine.outcome(engine.run("s", prompt(length), 0, logits=True))
    window = filled(engine.export("s"))
    assert isinstance(engine.import_("t", prompt(length), window), messages.Finished)
    uses = {use.session: use.kv_tokens for use in engine.report().sessions}
    assert uses == {"s": length, "t": length}
    request = engine.run("t", [7], NEW)
    tokens, reply = engine.outcome(request)
    assert tokens == reference.greedy(FOLDER, [*prompt(length), 7], NEW)
    assert isinstance(reply, messages.Finished) and reply.computed == 1
    assert engine.tokens("t", [], NEW) == reference.greedy(FOLDER, [*prompt(length), 7, *tokens], NEW)
    engine.report()


def test_tokens_behind_the_imported_kv_are_computed(engine: Engine) -> None:
    engine.open("s")
    engine.outcome(engine.run("s", prompt(40), 0, logits=True))
    window = filled(engine.export("s"))
    assert isinstance(engine.import_("t", prompt(40) + prompt(30, seed=1), window), messages.Finished)
    assert engine.tokens("t", [], NEW) == reference.greedy(FOLDER, prompt(40) + prompt(30, seed=1), NEW)


def test_the_last_imported_token_is_recomputed_to_sample_the_next(engine: Engine) -> None:
    engine.open("s")
    engine.outcome(engine.run("s", prompt(40), 0, logits=True))
    engine.import_("t", prompt(40), filled(engine.export("s")))
    assert engine.tokens("t", [], NEW) == reference.greedy(FOLDER, prompt(40), NEW)


def test_imported_kv_is_shared_with_no_other_session(engine: Engine) -> None:
    """Neither with a session of the same tokens, nor with another import, before and after it fills pages."""
    engine.open("s")
    engine.outcome(engine.run("s", prompt(300), 0, logits=True))
    window = filled(engine.export("s"))
    engine.send(messages.Close("s"))
    window.pages[:] = torch.flip(window.pages, [3])
    engine.import_("t", prompt(300), window)
    foreign = engine.tokens("t", [7], 300)
    assert foreign[:NEW] != reference.greedy(FOLDER, [*prompt(300), 7], NEW)
    engine.open("u")
    assert engine.tokens("u", [*prompt(300), 7], NEW) == reference.greedy(FOLDER, [*prompt(300), 7], NEW)
    engine.open("v", tokens=[*prompt(300), 7, *foreign])
    tokens = [*prompt(300), 7, *foreign]
    assert engine.tokens("v", [], NEW) == reference.greedy(FOLDER, tokens, NEW)
    engine.report()


def test_a_fork_of_an_import_has_its_kv(engine: Engine) -> None:
    engine.open("s")
    engine.outcome(engine.run("s", prompt(300), 0, logits=True))
    window = filled(engine.export("s"))
    window.pages[:, :, 1] *= 3
    engine.import_("t", prompt(300), window)
    engine.send(messages.Fork("u", "t", "agent"))
    assert engine.tokens("u", [7], NEW) == engine.tokens("t", [7], NEW)
    engine.report()


def test_a_fork_of_full_imported_pages_has_their_kv(engine: Engine) -> None:
    """Both sessions recompute the last token to sample the next one, and neither loses the rest of that page."""
    engine.open("s")
    expected = engine.tokens("s", prompt(256), NEW)
    engine.send(messages.Truncate("s", 256))
    engine.import_("t", prompt(256), filled(engine.export("s")))
    engine.send(messages.Fork("u", "t", "agent"))
    assert engine.tokens("t", [], NEW) == engine.tokens("u", [], NEW) == expected
    engine.report()


class WithHost(Engine, Tiered):
    """An engine with a host tier."""


def test_a_fork_of_full_imported_pages_works_with_a_host_tier() -> None:
    with WithHost() as engine:
        engine.load_with_tiers()
        engine.open("s")
        expected = engine.tokens("s", [*prompt(256), 7], NEW)
        engine.send(messages.Truncate("s", 256))
        engine.import_("t", prompt(256), filled(engine.export("s")))
        engine.send(messages.Fork("u", "t", "agent"), messages.Signal("u", waits=False))
        assert engine.tokens("u", [7], NEW) == expected
        engine.report()


def test_an_import_that_must_give_up_its_pages_fails_with_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the host would have its pages from before the rest of the KV came."""
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 1)
    with WithHost(max_batch_tokens=256) as engine:
        engine.load_with_tiers(kv_bytes=5 << 20)
        engine.open("s")
        engine.outcome(engine.run("s", prompt(1500), 0, logits=True))
        window = filled(engine.export("s"))
        engine.send(messages.Close("s"))
        engine.open("u")
        other = engine.run_message("u", prompt(2040, seed=3), 1)  # takes all pages
        left, queue = 6, Window.queue

        def queue_and_call(self: Window, *piece: object) -> None:
            nonlocal left
            queue(self, *piece)  # type: ignore[arg-type]
            left -= 1
            if left == 2:
                engine.send(other)

        monkeypatch.setattr(Window, "queue", queue_and_call)
        number = engine.number()
        message = messages.ImportKv(number, "t", "m", 0, "agent", prompt(1500), window.length, SALT)
        socket.send_fds(engine.socket, [messages.encode(message, 1)], [window.fd])
        outcomes = engine.outcomes([number, other.request])
        reply = outcomes[number][1]
        assert isinstance(reply, messages.Failed) and reply.code == "retry", reply
        assert isinstance(outcomes[other.request][1], messages.Finished)


def test_lost_pages_of_an_import_end_the_session(small: Engine) -> None:
    small.open("s")
    small.outcome(small.run("s", prompt(300), 0, logits=True))
    window = filled(small.export("s"))
    small.send(messages.Close("s"))
    small.import_("t", prompt(300), window)
    small.open("u")
    small.outcome(small.run("u", prompt(500, seed=3), 0, logits=True))  # takes all pages
    tokens, reply = small.outcome(small.run("t", [7], NEW))
    assert tokens == [] and isinstance(reply, messages.Failed) and reply.code == "session_lost"
    small.send(messages.Close("t"))
    small.report()


def test_an_import_larger_than_the_pool_is_refused(small: Engine) -> None:
    length = 4096
    window = KvWindow(small.layout, length)
    reply = small.import_("t", prompt(length), window)
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    small.send(messages.Close("t"))
    assert small.report().sessions == []


def test_a_session_closed_during_a_copy_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 1)
    engine.open("s")
    engine.outcome(engine.run("s", prompt(300), 0, logits=True))
    window = filled(engine.export("s"))
    number = engine.number()
    engine.send(messages.ExportKv(number, "s"), messages.Close("s"))
    _, reply = engine.outcome(number)
    assert isinstance(reply, messages.Failed) and reply.code == "session_not_found"
    number = engine.number()
    message = messages.ImportKv(number, "t", "m", 0, "agent", prompt(300), 300, SALT)
    frames = messages.encode(message, 1) + messages.encode(messages.Close("t"))
    socket.send_fds(engine.socket, [frames], [window.fd])
    _, reply = engine.outcome(number)
    assert isinstance(reply, messages.Failed) and reply.code == "session_not_found"
    report = engine.report()
    assert report.sessions == [] and report.models[0].pages_used == 0


def test_an_export_may_be_cancelled_while_kv_is_computed(engine: Engine) -> None:
    engine.open("s", tokens=prompt(300))
    number = engine.number()
    engine.send(messages.ExportKv(number, "s"), messages.CancelRun(number))
    _, reply = engine.outcome(number)  # the cancel may come too late or too early
    assert isinstance(reply, messages.KvExported | messages.Failed)
    assert engine.tokens("s", [], NEW) == reference.greedy(FOLDER, prompt(300), NEW)


def test_no_window_is_leaked(engine: Engine) -> None:
    engine.open("s")
    engine.tokens("s", prompt(30), NEW)
    before = open_descriptors()
    for _ in range(3):
        kv = engine.export("s")
        os.close(engine.descriptors.pop())
        with_tokens = filled(kv)
        engine.import_("t", prompt(kv.length), with_tokens)
        engine.send(messages.Close("t"))
        with_tokens.close()
        engine.report()
    assert open_descriptors() == before


def test_a_host_without_memory_for_a_window_fails_the_export(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise OSError(28, "No space left on device")

    engine.open("s")
    engine.tokens("s", prompt(30), NEW)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuses)
        number = engine.number()
        engine.send(messages.ExportKv(number, "s"))
        _, reply = engine.outcome(number)
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    assert engine.export("s").length == 38
