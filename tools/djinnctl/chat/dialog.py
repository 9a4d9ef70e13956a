"""A conversation and its forks: a session for each, with the messages that were exchanged in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from djinn_client import Generated, PauseReply, Session
from djinn_client.arguments.messages import as_message
from djinn_client.protocol import Class
from djinnctl.chat.settings import Settings
from djinnctl.chat.terminal import Answer
from djinnctl.chat.transcript import Message


@dataclass
class Branch:
    """A session and the conversation in it."""

    session: Session
    messages: list[Message] = field(default_factory=list)  # without the system message, which is a setting
    paused: bool = False


class Dialog:
    """Owns the sessions. The user talks to one of them, `branch`."""

    def __init__(
        self, model: str, settings: Settings, *, priority: Class | None, address: str | None, token: str | None = None
    ) -> None:
        """Loads the model if it is not loaded. Raises what `Session` raises."""
        self.settings = settings
        self.branches = [Branch(Session(model, priority=priority, address=address, token=token))]
        self.branch = self.branches[0]

    @property
    def number(self) -> int:
        """The number of the current branch, from 1."""
        return self.branches.index(self.branch) + 1

    def ask(self, text: str, answer: Answer) -> Generated:
        """Sends the message, writes the answer as it comes, and keeps both in the messages. After an interrupt it keeps
        the part of the answer that has come. If nothing has come, or after an error, it keeps neither."""
        self._wake()
        messages, said = self.branch.messages, list[str]()
        asked: Message = {"role": "user", "content": text}
        try:
            result = self._stream([*self.all_messages(), asked], said, answer)
        except KeyboardInterrupt:
            if any(said):
                messages += asked, {"role": "assistant", "content": "".join(said)}
            raise
        finally:
            answer.end()
        assert result.message is not None, "the answer to a chat has a message"
        messages += asked, as_message(result.message)
        return result

    def _stream(self, messages: list[Message], said: list[str], answer: Answer) -> Generated:
        settings = self.settings
        with self.branch.session.chat_stream(
            messages, template_arguments=settings.arguments or None, **settings.options
        ) as stream:
            for piece in stream:
                if piece.delta is not None:
                    answer.reason(piece.delta.reasoning)
                said.append(piece.text)
                answer.content(piece.text)
            return stream.result

    def all_messages(self) -> list[Message]:
        """The messages, with the system message before them."""
        system: list[Message] = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        return system + self.branch.messages

    def replace(self, messages: list[Message]) -> None:
        """Replaces the conversation. A system message at its beginning becomes the setting."""
        first, rest = messages[:1], messages[1:]
        if first and first[0]["role"] == "system":
            self.settings.system = first[0]["content"]
        else:
            rest = messages
        self.branch.messages[:] = rest

    def fork(self) -> Branch:
        """Forks the current branch; the fork is the current one then."""
        self._wake()
        self.branch = Branch(self.branch.session.fork(), list(self.branch.messages))
        self.branches.append(self.branch)
        return self.branch

    def switch(self, number: int) -> Branch:
        """Raises ValueError if there is no such branch."""
        if not 1 <= number <= len(self.branches):
            raise ValueError(f"there is no branch {number}: there are 1 to {len(self.branches)}")
        self.branch = self.branches[number - 1]
        return self.branch

    def pause(self) -> PauseReply:
        """Moves the session's pages off the device. The next message brings them back."""
        reply = self.branch.session.pause()
        self.branch.paused = True
        return reply

    def close(self) -> None:
        for branch in self.branches:
            branch.session.close()

    def _wake(self) -> None:
        if self.branch.paused:
            self.branch.session.unpause()
            self.branch.paused = False
