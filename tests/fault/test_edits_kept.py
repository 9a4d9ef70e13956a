"""Edits and hits survive any death, as a session's tokens do: the next engine computes with them and continues
alike."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator

import pytest

import djinn_client as djinn
from djinn_client.protocol import CloseSession, ForkSession, SessionOpened
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.support.daemon import wait_for
from tests.support.lives import Lives
from tests.support.steered import Steered

PROMPT = [*range(100, 140)]
WIDTH = 192  # of djinn-tiny
VALUES = array("f", random.Random(7).choices(range(-3, 4), k=WIDTH)).tobytes()


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with DaemonStarter() as start:
        yield Lives(start, {"kv": "16MiB", "host_kv": "16MiB", "disk_kv": "16MiB"})


def steered(address: str) -> Steered:
    """A session with edits of all kinds: from a position on, at positions, and ended ones."""
    tenant = Steered(address, values=VALUES)
    tenant.generate(6, PROMPT)
    assert tenant.add(points=["blocks.1"], scale=4.0) == 1
    assert (
        tenant.add(points=["blocks.2.hook_mlp_out"], op="replace", positions=[7, 8, 30], rows=3, values=VALUES * 3) == 2
    )
    tenant.generate(5)
    tenant.end(1)
    assert tenant.add(points=["blocks.0.hook_attn_out"], op="scale", scale=-1.5, rows=0, values=b"") == 3
    tenant.generate(4)
    return tenant


def go_on(tenant: Steered) -> list[int]:
    return [*tenant.generate(8), *tenant.generate(8, [5, 6])]


def gone_on(address: str) -> list[int]:
    with steered(address) as tenant:
        tokens = go_on(tenant)
        tenant.ask(CloseSession(id=9, session=tenant.session))
    return tokens


def no_more(lives: Lives) -> None:
    """The case without an event."""


def engine_killed(lives: Lives) -> None:
    pid = lives.engine()
    lives.kill_engine()
    wait_for(lambda: lives.engine() != pid and lives.now.device().state == "ready")


def daemon_killed(lives: Lives) -> None:
    lives.kill()
    lives.again()


def restarted(lives: Lives) -> None:
    with lives.now.client() as client:
        restart(client, warm=True)


@pytest.mark.parametrize("event", [no_more, engine_killed, daemon_killed, restarted])
def test_an_edited_session_continues_as_without_the_event(lives: Lives, event: Callable[[Lives], None]) -> None:
    expected = gone_on(lives.address)
    with steered(lives.address) as tenant:
        spans = tenant.spans()
        fork = tenant.ask(ForkSession(id=8, session=tenant.session))
        assert isinstance(fork, SessionOpened)
    event(lives)
    for session in (tenant.session, fork.session.id):
        with Steered(lives.address, session, VALUES) as again:
            assert again.spans() == spans
            assert go_on(again) == expected
            again.ask(CloseSession(id=9, session=session))


def looked_into(lives: Lives, event: Callable[[Lives], None]) -> list[int]:
    """Returns the tokens of a session that stops in its prompt, is edited there after the event, and stops once
    more."""
    s = djinn.Session("djinn-tiny", address=lives.address)
    breakpoints = [s.breakpoint(layer=0, when="prefill").id, s.breakpoint(layer=1, positions=[len(PROMPT) + 1]).id]
    hit = s.run(PROMPT, max_tokens=8, ignore_eos=True)
    assert isinstance(hit, djinn.Hit)
    s.detach()
    event(lives)
    with djinn.Session.attach(s.id, address=lives.address) as again:
        assert again.info.hit == hit.info and [each.id for each in again.breakpoints()] == breakpoints
        later = again.resume(hit.activation * -2, max_tokens=8, ignore_eos=True)
        assert isinstance(later, djinn.Hit) and later.positions == range(len(PROMPT) + 1, len(PROMPT) + 2)
        told = again.resume(max_tokens=8, ignore_eos=True)
        assert isinstance(told, djinn.Generated)
    return later.generated.token_ids + told.token_ids


@pytest.mark.parametrize("event", [engine_killed, daemon_killed, restarted])
def test_a_session_at_a_hit_continues_as_without_the_event(lives: Lives, event: Callable[[Lives], None]) -> None:
    assert looked_into(lives, event) == looked_into(lives, no_more)


def test_tokens_without_edits_differ(lives: Lives) -> None:
    """If they did not, the other tests would prove nothing."""
    with Steered(lives.address) as plain:
        plain.generate(15, PROMPT)
        tokens = go_on(plain)
        plain.ask(CloseSession(id=9, session=plain.session))
    assert tokens != gone_on(lives.address)
