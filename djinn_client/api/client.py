"""The blocking client's session."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from djinn_client.admin.loading_line import loading_line
from djinn_client.arguments.messages import Message
from djinn_client.arguments.options import ChatOptions, GenerateOptions
from djinn_client.errors import DjinnError
from djinn_client.handover.kv import KV, exported_kv
from djinn_client.handover.session_import import SessionImport, import_of_file, import_of_kv, save
from djinn_client.old_names import former_property
from djinn_client.protocol import Class, Generated, PauseReply, SessionInfo, SignalKind, Tier
from djinn_client.protocol.fields.scheduling import Why
from djinn_client.session.calls import SessionSteps
from djinn_client.session.streaming import Stream
from djinn_client.transport.connection import OnProgress
from djinn_client.transport.steps import run
from djinn_client.whitebox.inside import InsideModel

if TYPE_CHECKING:
    from typing import Self, Unpack

    import numpy as np
    import numpy.typing as npt


class Session(InsideModel):
    """A session of one model. The daemon keeps its tokens and KV between calls.

        with djinn.Session("djinn-tiny") as s:
            print(s.generate("def fibonacci(", max_tokens=32).text)

    `model` is loaded first if it is not loaded. `on_progress` is called with how far that has come; without it, a
    terminal shows a progress line when loading takes longer than a second. `address` is the path of the daemon's
    socket; None: $DJINND_ADDRESS, then the system's, then the user's. `priority` None is the highest class that the
    caller may have. `token` is one of the daemon's tokens (docs/guide/tokens.md); None: $DJINND_TOKEN. The `with` block
    closes the session.

    Ctrl-C in any call stops the work in the daemon within one step, and the session stays usable. Threads may share a
    session, but not call it at once: the second call raises SessionBusy. A process that is forked from this one calls
    it over a connection of its own, and does not close it: only the process that has opened it does.
    """

    def __init__(
        self,
        model: str,
        *,
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Raises ConnectionLost, ModelNotFound, ModelRejected, OutOfMemory, InvalidRequest."""
        self._steps = SessionSteps(address, token)
        with loading_line(on_progress) as told:
            run(self._steps.open(model, priority, told))

    @classmethod
    def _over(cls, steps: SessionSteps) -> Self:
        session = cls.__new__(cls)
        session._steps = steps
        return session

    @property
    def id(self) -> str:
        return self._steps.info.id

    @property
    def info(self) -> SessionInfo:
        """The session as it was when it was opened or attached; `djinn.sessions()` has it as it is now."""
        return self._steps.info

    @former_property
    def token_ids(self) -> list[int]:
        """All tokens that the session has now, of prompts and outputs."""
        return run(self._steps.token_ids())

    def generate(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Generated:
        """Extends the session by the prompt and generates. The prompt is a text or token ids; None goes on from where
        the session is. A model that was trained for chats wants `chat`.

        The options are those of `GenerateOptions`.

        Raises InvalidRequest, PromptTooLong, TokenOutOfRange, OutOfMemory, Retry.
        """
        return run(self._steps.generate(prompt, options))

    def stream(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Does what `generate` does and gives the output piece by piece. The call begins with the first piece."""
        return Stream(self._steps.stream(prompt, options))

    def chat(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Generated:
        """The model's answer in a chat: `.text` is its content, `.message` also has reasoning and tool calls.

            s.chat("Name a river.")
            s.chat("And where does it end?")

        A text is the user's next message, after `messages`; a list of messages, in OpenAI's form, is the whole chat.
        The model's template makes a prompt of it. The session keeps the tokens that it has in common with the prompt
        and computes the others: in a chat that goes on the new messages, in an edited one all that follows the edit.

        The options are those of `ChatOptions`. Raises what `generate` raises, and InvalidRequest for a model without a
        template or with the sentence of a template that refuses. After an error `messages` is as before."""
        return run(self._steps.chat(said, options))

    def chat_stream(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Stream:
        """Does what `chat` does and gives the answer piece by piece: `piece.text` is content, `piece.delta` has
        reasoning and tool calls. `messages` has the answer when the stream was read to its end."""
        return Stream(self._steps.chat_stream(said, options))

    @property
    def messages(self) -> list[Message]:
        """The chat so far, answers included. This object has it, not the daemon: change it or set it to go on from
        elsewhere. After attach() it is empty. `s.chat(s.messages[:-1])` answers the last message anew."""
        return self._steps.messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._steps.messages = list(messages)

    def forward(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """Extends the session by these n tokens and returns their logits, float32 [n, vocab], mapped and not copied."""
        return run(self._steps.forward(token_ids))

    def truncate(self, length: int) -> None:
        """Keeps only the first `length` tokens. Raises InvalidRequest if there are fewer."""
        run(self._steps.truncate(length))

    def keep_record(self, body: bytes = b"", *, name: str = "") -> str:
        """Keeps the point at which the session is, with the caller's own bytes, and returns the record's name. See
        Client.keep_record."""
        return run(self._steps.keep_record(body, name))

    def fork(self, priority: Class | None = None) -> Self:
        """A second session with the tokens and KV of this one, which goes its own way from here. Common pages are held
        once.

        The fork has a connection of its own, may be called while this session runs a call, and has to be closed, too.
        `priority` None: as this one. Raises SessionBusy while a call runs, NotPermitted or QuotaExceeded at a
        limit of sessions."""
        return self._over(run(self._steps.fork(priority)))

    def kv(self) -> KV:
        """The KV of all tokens, in memory that is mapped into this process: see KV. The daemon computes missing KV
        first, and one copy over the bus brings it. Raises OutOfMemory, Retry."""
        answer = run(self._steps.export(kv=True))
        return exported_kv(answer.message, answer.fds)

    def save(self, path: str | os.PathLike[str], *, kv: bool | None = None) -> None:
        """Writes the session to a file, which only its owner may read, for `load`; replaces one that is there.

        `kv` None: with its KV only if that does not follow from its tokens (`info.foreign_kv`, or edits). Otherwise the
        file has only tokens, a few kilobytes, and `load` has their KV computed. Raises OSError, and what `kv()`
        raises."""
        save(path, self._steps.info, run(self._steps.export(kv)))

    @classmethod
    def attach(cls, session: str, *, address: str | None = None, token: str | None = None) -> Self:
        """The session with this id, left by detach() or by a client that died. Raises SessionNotFound."""
        steps = SessionSteps(address, token)
        run(steps.attach(session))
        return cls._over(steps)

    @classmethod
    def from_kv(
        cls,
        model: str,
        tokens: Iterable[int],
        kv: Any,
        *,
        priority: Class | None = None,
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """A new session with these tokens, and the KV of the first of them from this process: computed here, or edited.

        kv   a KvWindow that was filled, which is uploaded as it lies; a KV, or pages of all tokens as a tensor or an
             array [pages, blocks, 2, page_size, kv_heads, head_dim] in the model's dtype, which are copied into a
             window first

        Tokens without KV in `kv` are computed when the session first runs. If the first call has no prompt, the last
        token's KV is computed anew, to choose the next token.

        The KV is not checked and cannot be computed again. So the session shares it only with its forks, is not in the
        journal, and is lost with the engine that has it: the next call then raises SessionLost.

        Raises InvalidRequest if the KV does not fit model or tokens, PromptTooLong, TokenOutOfRange, OutOfMemory,
        Retry."""
        return cls._imported(import_of_kv(model, tokens, kv, priority, address, on_progress), address, on_progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kv: bool | None = None,
        model: str | None = None,
        priority: Class | None = None,
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """A new session with what a file of `save` has. `model` and `priority` None: as when it was saved; a model of
        another name must have the same weights. `kv` False: without the file's KV, which is computed from the tokens.

        A session with KV from a file ends with the engine that has it, as one of `from_kv`.

        Raises FileDamaged, ModelMismatch, InvalidRequest for KV of another form than the daemon's, OSError, and what
        `Session` raises."""
        return cls._imported(import_of_file(path, model, priority, kv), address, on_progress)

    @classmethod
    def _imported(cls, handed: SessionImport, address: str | None, on_progress: OnProgress | None) -> Self:
        steps = SessionSteps(address)
        with loading_line(on_progress) as told:
            run(steps.import_(handed.request, handed.fds, told))
        return cls._over(steps)

    def signal(self, kind: SignalKind, *, expected_s: float | None = None, tool: str = "") -> None:
        """Tells the daemon what comes next, and waits for no answer; between two pieces of a stream, too.

        "io_wait": nothing, for `expected_s` seconds (at most a day; None or 0: not known), so the session's pages may
        leave the device, and are back in time where the time is known. Where it is not, the daemon goes by how long
        this user's sessions have waited for the `tool` of that name (at most 64 characters) before.
        "compute": a call, in a moment; "prefill" and "decode" mean the same.

        Raises InvalidRequest; SessionBusy while a call runs.
        """
        run(self._steps.signal(kind, expected_s, tool))

    @contextmanager
    def io_wait(self, expected_s: float | None = None, *, tool: str = "") -> Iterator[None]:
        """`with s.io_wait(tool="search"): search()` signals "io_wait" before it and "compute" after it, also where it
        raises."""
        self.signal("io_wait", expected_s=expected_s, tool=tool)
        try:
            yield
        except BaseException:
            with suppress(DjinnError):  # the caller must see the first error
                self.signal("compute")
            raise
        if not self._steps.ended:
            self.signal("compute")

    def pause(self, tier: Tier = "host") -> PauseReply:
        """Stops the session, in the middle of a call too, and moves its pages off the device: to "host" or "disk".
        Returns when they are there, with how many they are.

        The call's stream stays open, and goes on at unpause() with the token that would have come; a call that is made
        meanwhile waits for that. May be called while a call runs. A restart of the daemon ends the pause.

        Raises InvalidRequest, OutOfMemory where the tier has no room, Retry.
        """
        return run(self._steps.pause(tier))

    def unpause(self) -> None:
        """Lets a paused session go on from where pause() stopped it. A session that is not paused stays as it is. May
        be called while a call runs. Raises Retry."""
        run(self._steps.unpause())

    def set_priority(self, priority: Class) -> None:
        """The session has this class from now on. May be called while a call runs, which goes on in it.

        Raises InvalidRequest, QuotaExceeded for a higher class than the user may have, Retry."""
        run(self._steps.set_priority(priority))

    def why(self) -> Why:
        """Why the session is running, or not: for people, see Why. May be called while a call runs."""
        return run(self._steps.why())

    def close(self) -> None:
        """Closes the session in the daemon; again does nothing. In a process that was forked from the one that opened
        it: detach()."""
        run(self._steps.close())

    def detach(self) -> None:
        """Hangs up. The session lives on for the daemon's grace time: `Session.attach(s.id)` takes it up again."""
        self._steps.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # the caller must see the first error
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.info.model}>"
