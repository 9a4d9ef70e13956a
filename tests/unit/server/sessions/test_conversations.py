from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from djinnd.server.sessions.conversations import (
    COMPARED,
    TAIL,
    Conversations,
    ConversationState,
    digests,
    kept_again,
    settled,
)
from djinnd.server.sessions.session_adapter import SessionAdapter

PROMPT = list(range(100, 150))
ANSWER = [7, 8, 9]
FAR = [5, 5, 5, 5, 5, 5]


@dataclass(eq=False)
class Session:
    id: str = "s"
    user: int = 1
    model: str = "m"
    tokens: list[int] = field(default_factory=list)
    used: float = 0.0
    kept: ConversationState | None = None
    is_free: bool = True
    is_plain: bool = True
    adapter: SessionAdapter | None = None


@pytest.fixture
def conversations():
    return Conversations()


def spoken(conversations, prompt, name="s", key="", answer=ANSWER, **fields):
    """A session that has had a call with this prompt."""
    session = Session(name, tokens=[*prompt, *answer], **fields)
    _, session.kept = conversations.choose(session.user, session.model, key, prompt)
    conversations.add(session)
    return session


def chosen(conversations, prompt, key="", user=1, model="m", adapter=None):
    return conversations.choose(user, model, key, prompt, adapter=adapter).session


def test_a_transcript_that_goes_on_finds_its_session(conversations):
    session = spoken(conversations, PROMPT)
    assert chosen(conversations, [*PROMPT, *ANSWER, 1, 2]) is session
    assert chosen(conversations, PROMPT) is session  # once more
    assert chosen(conversations, [*PROMPT[:-TAIL], 1, 2, 3, 4, 5]) is session  # the template ends it in another way
    assert chosen(conversations, PROMPT[: -TAIL - 1]) is None
    assert chosen(conversations, [0, *PROMPT[1:], *ANSWER]) is None


def test_a_short_prompt_must_be_there_whole(conversations):
    session = spoken(conversations, [1, 2, 3, 4, 5])
    assert chosen(conversations, [1, 2, 3, 4, 5, 6]) is session
    assert chosen(conversations, [1, 2, 3, 4, 6, 6]) is None


def test_of_several_the_one_that_begins_like_the_prompt_for_longest(conversations):
    short, long = spoken(conversations, PROMPT, "short"), spoken(conversations, [*PROMPT, *ANSWER, *FAR], "long")
    assert chosen(conversations, [*PROMPT, *ANSWER, *FAR, 7]) is long
    assert chosen(conversations, [*PROMPT, 1]) is short
    other = spoken(conversations, PROMPT, "other", answer=[4, 4, 4], used=9.0)
    assert chosen(conversations, [*PROMPT, 4, 4, 4, 4]) is other
    assert chosen(conversations, [*PROMPT, *ANSWER, 1]) is short


@pytest.mark.parametrize(
    "otherwise", [{"user": 2}, {"model": "n"}, {"is_free": False}, {"is_plain": False}, {"key": "k"}], ids=str
)
def test_not_another_user_s_or_model_s_nor_a_busy_a_steered_or_a_keyed_one(conversations, otherwise):
    spoken(conversations, PROMPT, **otherwise)
    assert chosen(conversations, [*PROMPT, *ANSWER]) is None


def test_a_key_finds_its_session_whatever_the_prompt_is(conversations):
    session = spoken(conversations, PROMPT, key="k")
    assert chosen(conversations, [5, 5], key="k") is session
    assert conversations.choose(1, "m", "k", [5, 5]).kept == ConversationState("k", 2)
    assert chosen(conversations, PROMPT, key="other") is None
    assert chosen(conversations, PROMPT, key="k", user=2) is chosen(conversations, PROMPT, key="k", model="n") is None


def test_while_the_session_of_a_key_is_busy_a_new_one_without_it(conversations):
    session = spoken(conversations, PROMPT, key="k")
    session.is_free = False
    choice = conversations.choose(1, "m", "k", PROMPT)
    assert choice.session is None and choice.kept.key == ""
    assert choice.kept == conversations.choose(1, "m", "", PROMPT).kept


def test_a_removed_session_is_not_found(conversations):
    session, keyed = spoken(conversations, PROMPT), spoken(conversations, PROMPT, "keyed", key="k")
    assert conversations.count(1) == 2
    for each in (session, keyed, keyed):
        conversations.remove(each)
    assert (conversations.count(1), list(conversations)) == (0, [])
    assert chosen(conversations, [*PROMPT, 1]) is chosen(conversations, PROMPT, key="k") is None
    conversations.add(keyed)


def test_the_one_that_was_used_longest_ago_gives_way(conversations):
    spoken(conversations, PROMPT, "a", used=3.0)
    b = spoken(conversations, PROMPT, "b", used=2.0)
    spoken(conversations, PROMPT, "c", used=1.0, is_free=False)
    assert conversations.give_way(1) is b
    assert conversations.give_way(2) is None


def test_few_are_compared_however_many_are_alike(conversations):
    class Counted(list):
        looks = 0

        def __getitem__(self, at):
            Counted.looks += 1
            return super().__getitem__(at)

    for number in range(10 * COMPARED):
        session = spoken(conversations, PROMPT, str(number), key=str(number))
        session.tokens, session.kept = Counted(session.tokens), kept_again("", len(PROMPT), PROMPT)
    assert chosen(conversations, [*PROMPT, *ANSWER]) is not None
    assert 0 < Counted.looks <= COMPARED * 8


def test_a_session_that_an_earlier_daemon_has_kept(conversations):
    session = spoken(conversations, PROMPT)
    assert kept_again("", len(PROMPT), session.tokens) == session.kept
    assert kept_again("k", len(PROMPT), session.tokens) == ConversationState("k", len(PROMPT))
    cut = kept_again("", len(PROMPT), PROMPT[:20])  # the daemon died before all of the prompt was written
    assert (cut.prompt, cut.digest) == (20, digests(PROMPT, [settled(20)])[settled(20)])
    assert kept_again("", 5, []).prompt == 0


def test_a_session_with_an_adapter_is_found_by_calls_with_it_only(conversations):
    poet, other = SessionAdapter("poet", b"1"), SessionAdapter("poet", b"2")
    session = Session("s", tokens=[*PROMPT, *ANSWER], adapter=poet)
    _, session.kept = conversations.choose(1, "m", "", PROMPT, adapter=poet)
    conversations.add(session)
    later = [*PROMPT, *ANSWER, 9]
    assert chosen(conversations, later, adapter=poet) is session
    assert chosen(conversations, later) is chosen(conversations, later, adapter=other) is None
