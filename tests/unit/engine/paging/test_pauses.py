"""Sessions that are paused, to the host or to disk, and go on, with other messages in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djinnd import messages
from djinnd.engine.paging.pauses import Pauses
from tests.support import reference
from tests.support.besides import on_message
from tests.support.tiered import FOLDER, NEW, PROMPT, TIER, Tiered, expected, tiered


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Tiered]:
    with tiered(tmp_path) as engine:
        yield engine


@pytest.fixture
def untiered() -> Iterator[Tiered]:
    with Tiered() as engine:
        engine.loaded(FOLDER)
        engine.open("s")
        yield engine


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_resumed_session_gives_the_same_tokens(engine: Tiered, tier: str) -> None:
    tokens = engine.ran("s")
    told = engine.paused("s", tier)
    assert told.pages == 3 and told.seconds > 0
    use = engine.use("s")
    assert (use.state, use.pages, use.host_pages, use.disk_pages) == (
        ("paused", 0, 3, 0) if tier == "host" else ("paused", 0, 0, 3)
    )
    engine.send(messages.Resume("s"))
    more = engine.ran("s", [5])
    assert more == expected([*PROMPT, *tokens, 5])


def test_a_session_above_its_tenant_s_disk_quota_is_not_paused(engine: Tiered) -> None:
    (info,) = engine.report().models
    tokens, limit = engine.ran("s"), 2 * info.page_bytes
    engine.send(messages.SetTenants([messages.TenantLimits(0, disk_kv=limit)]))
    told = engine.refused("s", "disk")
    assert told.code == "quota_exceeded" and "exceed the quota disk_kv" in told.message
    assert told.data == {"quota": "disk_kv", "limit": limit, "used": limit}
    assert engine.ran("s", [5]) == expected([*PROMPT, *tokens, 5])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_session_is_paused_during_a_run_while_others_run_on(engine: Tiered, tier: str) -> None:
    engine.open("other")
    run, other = engine.run_message("s", PROMPT, 1000), engine.run_message("other", [7, 8, 9], 60)
    engine.send(run, other)
    tokens: dict[int, list[int]] = {run.request: [], other.request: []}
    asked: messages.Pause | None = engine.pause("s", tier)
    replies: list[messages.FromEngine] = []
    while len(replies) < 2:  # of the pause, and of the other session's end
        message = engine.receive()
        if not isinstance(message, messages.Stepped):
            replies.append(message)
            continue
        for token in message.tokens:
            tokens[token.request].append(token.token)
        if message.tokens and len(tokens[run.request]) == 3 and asked is not None:
            engine.send(asked)
            asked = None
    assert {type(reply) for reply in replies} == {messages.Paused, messages.Finished}
    told = tokens[run.request]
    before = len(told)
    assert before >= 3 and engine.use("s").pages == 0
    engine.send(messages.Resume("s"))
    while len(told) < before + NEW:
        told += [token.token for token in engine.until(messages.Stepped).tokens]
    engine.send(messages.CancelRun(run.request))
    rest, reply = engine.outcome(run.request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled"
    assert told + rest == reference.greedy(FOLDER, PROMPT, len(told + rest))


def test_a_run_of_a_paused_session_waits_for_its_resume(engine: Tiered) -> None:
    engine.send(messages.Open("p", "m", 0, "agent", PROMPT[:300], paused=True))
    run = engine.run_message("p", PROMPT[300:], NEW)
    engine.send(run)
    assert engine.ran("s") == expected()
    assert engine.use("p").state == "paused"
    engine.send(messages.Resume("p"))
    tokens, _ = engine.outcome(run.request)
    assert tokens == expected()


@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_a_run_of_a_paused_session_can_be_cancelled(engine: Tiered, ends: str) -> None:
    engine.paused("s")
    run = engine.run_message("s", PROMPT, NEW)
    engine.send(run, messages.CancelRun(run.request) if ends == "cancel" else messages.Close("s"))
    tokens, reply = engine.outcome(run.request)
    assert isinstance(reply, messages.Finished) and (tokens, reply.reason) == ([], "cancelled")


def test_a_fork_of_a_paused_session_is_not_paused(engine: Tiered) -> None:
    tokens = engine.ran("s")
    engine.paused("s")
    engine.send(messages.Fork("t", "s", "agent"))
    assert engine.ran("t", [5]) == expected([*PROMPT, *tokens, 5])
    assert engine.use("s").state == "paused"


@pytest.mark.parametrize("between", ["close", "resume", "unload", "truncate", "pause again", "wait"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_pause_gets_one_reply_with_any_message_in_between(engine: Tiered, tier: str, between: str) -> None:
    engine.ran("s")
    asked, again = engine.pause("s", tier), engine.pause("s", "host")
    follow = {
        "close": [messages.Close("s")],
        "resume": [messages.Resume("s")],
        "unload": [messages.Close("s"), messages.Unload(77, "m")],
        "truncate": [messages.Truncate("s", 300)],
        "pause again": [again],
        "wait": [messages.Signal("s", waits=True)],
    }[between]
    engine.send(asked, *follow)
    replies: list[messages.FromEngine] = []
    wanted = {asked.request} | ({again.request} if between == "pause again" else set())
    while wanted - {getattr(reply, "request", 0) for reply in replies}:
        replies.append(engine.receive())
    inquired = engine.number()
    engine.send(messages.Inquire(inquired))
    while not isinstance(last := engine.receive(), messages.Report):
        replies.append(last)
    answers = [reply for reply in replies if getattr(reply, "request", 0) in wanted]
    assert len(answers) == len(wanted)
    refused = [reply.code for reply in answers if isinstance(reply, messages.Failed)]
    assert refused == {"close": ["session_not_found"], "unload": ["session_not_found"], "resume": ["retry"]}.get(
        between, []
    )


def test_a_pause_without_copies_is_answered_in_the_same_turn(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ran("s")
    engine.paused("s", "disk")
    done, turn, send = list[str](), Pauses.turn, engine.channel.send

    def note(message: Any) -> None:
        done.append(type(message).__name__)

    on_message(monkeypatch, engine.engine, note)
    monkeypatch.setattr(engine.channel, "send", lambda message, *fds: (note(message), send(message, *fds)))
    monkeypatch.setattr(Pauses, "turn", lambda pauses: (done.append("turn"), turn(pauses)))
    assert engine.paused("s", "disk").pages == 3
    engine.report()
    asked = done.index("Pause")
    assert [each for each in done[asked:] if each in ("turn", "Paused")][:2] == ["turn", "Paused"]


def test_a_pause_to_a_missing_tier_is_refused_and_the_session_runs_on(untiered: Tiered) -> None:
    assert untiered.ran("s") == expected()
    for tier in ("host", "disk"):
        reply = untiered.refused("s", tier)
        assert reply.code == "out_of_memory" and reply.data["tier"] == tier
    assert untiered.use("s").state == "idle"


def test_a_pause_to_disk_without_a_disk_tier_is_refused() -> None:
    with Tiered() as engine:
        engine.load_with_tiers()
        engine.open("s")
        assert engine.refused("s", "disk").data["tier"] == "disk"
        engine.paused("s")


def test_an_unknown_session_cannot_be_paused(engine: Tiered) -> None:
    assert engine.refused("ghost").code == "session_not_found"
    engine.send(messages.Resume("ghost"))
    assert engine.ran("s") == expected()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_pause_waits_until_the_host_tier_is_set_up(tmp_path: Path, tier: str) -> None:
    with Tiered() as engine:
        engine.loaded(FOLDER, host_kv_bytes=TIER, disk_kv_bytes=TIER, disk_folder=str(tmp_path))
        wanted = engine.until(messages.NeedArena)
        engine.open("s")
        tokens = engine.ran("s")
        asked = engine.pause("s", tier)
        engine.send(asked)
        assert engine.use("s").state == "paused"
        engine.send(engine.grant(wanted))
        told = engine.until(messages.Paused)
        assert (told.request, told.pages, engine.use("s").pages) == (asked.request, 3, 0)
        engine.send(messages.Resume("s"))
        assert engine.ran("s", [5]) == expected([*PROMPT, *tokens, 5])


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_pause_is_refused_if_the_tier_that_it_waited_for_fails(was_paused: bool) -> None:
    with Tiered() as engine:
        engine.loaded(FOLDER, host_kv_bytes=TIER)
        wanted = engine.until(messages.NeedArena)
        engine.send(messages.Open("s", "m", 0, "agent", PROMPT, paused=was_paused))
        asked = engine.pause("s")
        engine.send(asked)
        assert engine.use("s").state == "paused"
        engine.send(messages.ArenaRefused(wanted.request, "the host is full"))
        refusal = engine.until(messages.Failed)
        assert (refusal.request, refusal.code) == (asked.request, "out_of_memory")
        assert "the host is full" in refusal.message
        assert engine.use("s").state == ("paused" if was_paused else "idle")
