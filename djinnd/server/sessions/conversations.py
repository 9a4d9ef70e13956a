"""Chooses the session for a call of a program without sessions, which sends the whole transcript each time.

    a key that an earlier call had   that call's session; if it is busy, a new session without a key
    no key, or a new one             no key: the idle session without a key that begins like the prompt for longest
                                     neither: a new session, kept under the key

A session without a key is a candidate if the prompt begins with the session's last prompt, except its last TAIL tokens.
To find candidates, the prompt is hashed once, with a stop at each length that a candidate has; tokens are compared only
where the hashes are equal. Sessions that the daemon keeps for this are *kept*. If a user needs room, the longest idle
one is closed first. Pure: no I/O, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128

from djinnd.server.sessions.common_prefix import common_prefix

if TYPE_CHECKING:
    from djinnd.server.sessions.session import SessionRecord
    from djinnd.server.sessions.session_adapter import SessionAdapter

# A template may end a prompt with tokens that the transcript does not have later, such as Qwen's empty block of
# thoughts, which is 4 tokens long. A prompt of fewer than _LEAST tokens must come back whole.
TAIL = 4
_LEAST = 16
COMPARED = 8  # candidates, at most, whose tokens are compared with the prompt


@dataclass(slots=True, frozen=True)
class ConversationState:
    """A description of a kept session. `prompt`: the length of its last prompt in tokens; `digest`: the hash of the
    tokens with which the next prompt must begin."""

    key: str = ""
    prompt: int = 0
    digest: bytes = b""


class SessionChoice(NamedTuple):
    """The session to go on with (None: a new one), and its description from now on."""

    session: SessionRecord | None
    kept: ConversationState


def settled(prompt: int) -> int:
    """Returns how many tokens of a prompt of this length must stand again at the beginning of the conversation's next
    prompt."""
    return prompt if prompt < _LEAST else prompt - TAIL


def digests(tokens: Sequence[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Maps each of these lengths to the hash of that many first tokens. Lengths beyond the tokens are left out."""
    hashed, found, at = xxh3_128(), {}, 0
    data = memoryview(array("I", tokens))
    for length in sorted(set(lengths)):
        if length > len(data):
            break
        hashed.update(data[at:length])
        found[length], at = hashed.digest(), length
    return found


def kept_again(key: str, prompt: int, tokens: Sequence[int]) -> ConversationState:
    """Describes a session by its own tokens. After a restart or a failed call it may have fewer than the prompt."""
    prompt = min(prompt, len(tokens))
    return ConversationState(key, prompt, b"" if key else digests(tokens, [settled(prompt)])[settled(prompt)])


class Conversations:
    """The kept sessions of all users. Each is here from `add` until `remove`."""

    def __init__(self) -> None:
        self._of: dict[int, dict[str, SessionRecord]] = {}  # by user, and by the session's id
        self._keyed: dict[tuple[int, str, SessionAdapter | None, str], SessionRecord] = {}  # see _place

    def __iter__(self) -> Iterator[SessionRecord]:
        return (session for own in self._of.values() for session in own.values())

    def count(self, user: int) -> int:
        return len(self._of.get(user, ()))

    def choose(
        self,
        user: int,
        model: str,
        key: str,
        prompt: Sequence[int],
        at: SessionRecord | None = None,
        adapter: SessionAdapter | None = None,
    ) -> SessionChoice:
        """Chooses a session for a call with this prompt. `at`: a free session at exactly the point from which the call
        continues."""
        if at is not None and at.kept is not None:
            return SessionChoice(at, kept_again(at.kept.key, len(prompt), prompt))
        if key:
            session = self._keyed.get((user, model, adapter, key))
            is_busy = session is not None and not session.is_free
            if not is_busy:
                return SessionChoice(session, ConversationState(key, len(prompt)))
        candidates = [] if key else list(self._candidates(user, model, adapter))
        end = settled(len(prompt))
        found = digests(prompt, [end, *(settled(kept.prompt) for _, kept in candidates)])
        alike = [each for each in candidates if found.get(settled(each[1].prompt)) == each[1].digest]
        return SessionChoice(_longest(alike, prompt), ConversationState("", len(prompt), found[end]))

    def add(self, session: SessionRecord) -> None:
        """Adds a session whose `kept` is set. A key finds the first session that has it."""
        assert session.kept is not None
        self._of.setdefault(session.user, {})[session.id] = session
        if session.kept.key:
            self._keyed.setdefault(_place(session, session.kept.key), session)

    def remove(self, session: SessionRecord) -> None:
        """Removes a session, if it is here."""
        own = self._of.get(session.user, {})
        if own.pop(session.id, None) is None or session.kept is None:
            return
        if not own:
            del self._of[session.user]
        name = _place(session, session.kept.key)
        if self._keyed.get(name) is session:
            del self._keyed[name]

    def idle(self, user: int) -> list[SessionRecord]:
        """The user's kept sessions that may be closed."""
        return [session for session in self._of.get(user, {}).values() if session.is_free]

    def give_way(self, user: int) -> SessionRecord | None:
        """The user's kept session that has been idle for longest."""
        return min(self.idle(user), key=lambda session: session.used, default=None)

    def _candidates(
        self, user: int, model: str, adapter: SessionAdapter | None
    ) -> Iterator[tuple[SessionRecord, ConversationState]]:
        for session in self._of.get(user, {}).values():
            kept, is_of_it = session.kept, (session.model, session.adapter) == (model, adapter)
            if kept is not None and not kept.key and is_of_it and session.is_free and session.is_plain:
                yield session, kept


def _place(session: SessionRecord, key: str) -> tuple[int, str, SessionAdapter | None, str]:
    return session.user, session.model, session.adapter, key


def _longest(alike: list[tuple[SessionRecord, ConversationState]], prompt: Sequence[int]) -> SessionRecord | None:
    """Picks the session with the longest common prefix with the prompt, among sessions with equal hashes."""
    alike.sort(key=lambda each: (each[1].prompt, each[0].used), reverse=True)
    best, most = None, 0
    for session, kept in alike[:COMPARED]:
        common = common_prefix(session.tokens, prompt)
        if common >= min(settled(kept.prompt), len(prompt) - 1) and common > most:
            best, most = session, common
    return best
