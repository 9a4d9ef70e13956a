"""The calls of a session, as steps, which `Session` and `AsyncSession` run each in its own way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from djinn_client.arguments.messages import Message, as_message, continued, history
from djinn_client.arguments.options import (
    ChatOptions,
    GenerateOptions,
    build,
    chat_request,
    generate_request,
    signal_message,
)
from djinn_client.arguments.options import token_ids as listed_ids
from djinn_client.protocol import Class, SignalKind, Tier, replies, requests
from djinn_client.protocol.fields.points import PointMap
from djinn_client.protocol.fields.scheduling import Why
from djinn_client.session.choices import expect_count, generate_choices
from djinn_client.session.connected import ConnectedSession
from djinn_client.session.streaming import StreamSteps
from djinn_client.tensors.arrays import expect_arrays, logits_array
from djinn_client.transport.exchange import Delivery
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np
    import numpy.typing as npt

    from djinn_client.transport.connection import OnProgress


class SessionCalls(ConnectedSession):
    """These calls as steps. A `Session` runs them to their end, and an `AsyncSession` is awaited."""

    def __init__(self, address: str | None, token: str | None = None) -> None:
        super().__init__(address, token)
        self.messages: list[Message] = []  # of the chat
        self.is_paused = False  # by a call of this object
        self._points: PointMap | None = None  # of the model, once asked for

    def fork(self, priority: Class | None) -> Steps[SessionCalls]:
        """The new session has a connection of its own, so that both can be called at once."""
        self._expect_idle()
        with self._turn:
            self._expect_no_stream()
            self.expect_held()
            fork = SessionCalls(self._address, self._token)
            yield from fork.enter(build(requests.ForkSession, session=self.info.id, priority=priority))
            fork.messages = list(self.messages)
            fork.interventions = self.interventions and self.interventions.copy()
            return fork

    def generate(
        self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Steps[replies.Generated]:
        """Extends the session by the prompt and generates. The prompt is a text or token ids; None continues from the
        session's last token. For a model that was trained for chats, use `chat`.

        The options are those of `GenerateOptions`.

        Raises InvalidRequest, PromptTooLong, TokenOutOfRange, OutOfMemory, Retry.
        """
        request = generate_request(self.info.id, prompt, {**options, "n": 1}, stream=False)
        return (yield from self._generate(request, options.get("n", 1)))

    def _generate(self, request: requests.Generate, n: int) -> Steps[replies.Generated]:
        expect_count(n)
        if n == 1:
            return (yield from self.call_generate(request))
        self._expect_no_interventions("generate with n")
        return (yield from generate_choices(self, request, n))

    def stream(self, prompt: str | Iterable[int] | None, options: GenerateOptions) -> StreamSteps:
        return StreamSteps(self, generate_request(self.info.id, prompt, options, stream=True))

    def chat(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Steps[replies.Generated]:
        """The model's answer in a chat: `.text` is its content, `.message` also has reasoning and tool calls.

            s.chat("Name a river.")
            s.chat("And where does it end?")

        A text is the user's next message, after `messages`; a list of messages, in OpenAI's form, is the whole chat.
        The model's template makes a prompt of it. The session keeps the prefix that it shares with the prompt and
        computes the rest: the new messages, or everything after an edit.

        The options are those of `ChatOptions`. Raises what `generate` raises, and InvalidRequest for a model without a
        template or with the sentence of a template that refuses. After an error `messages` is as before."""
        self._expect_no_interventions("chat")
        messages = history(said, self.messages)
        request = chat_request(self.info.id, messages, {**options, "n": 1}, stream=False)
        result = yield from self._generate(request, options.get("n", 1))
        self._answered(messages, options, result)
        return result

    def chat_stream(self, said: str | Iterable[Message], options: ChatOptions) -> StreamSteps:
        messages = history(said, self.messages)
        request = chat_request(self.info.id, messages, options, stream=True)
        return StreamSteps(self, request, lambda result: self._answered(messages, options, result))

    def _answered(self, messages: list[Message], options: ChatOptions, result: replies.Generated) -> None:
        """Adds the answer to the messages, unless it has stopped at a breakpoint and is not whole."""
        if result.hit is not None:
            return
        assert result.message is not None, "the answer to a chat has a message"
        said = as_message(result.message)
        self.messages = continued(messages, said) if options.get("continue_final") else [*messages, said]

    def forward(
        self, token_ids: Iterable[int], *, on_progress: OnProgress | None = None
    ) -> Steps[npt.NDArray[np.float32]]:
        """Extends the session by these n tokens and returns their logits, float32 [n, vocab], mapped and not copied.
        `on_progress` is told how many bytes of them have come."""
        self._expect_no_interventions("forward")
        expect_arrays("forward")
        request = build(requests.Forward, session=self.info.id, token_ids=listed_ids(token_ids))
        return logits_array(*(yield from self.call(request, replies.Logits, on_progress)))

    def token_ids(self) -> Steps[list[int]]:
        """All tokens that the session has now, of prompts and outputs."""
        request = build(requests.GetTokens, session=self.info.id)
        return (yield from self.call(request, replies.TokenIds)).message.token_ids

    def truncate(self, length: int) -> Steps[None]:
        """Keeps only the first `length` tokens. Raises InvalidRequest if there are fewer."""
        yield from self.call(build(requests.Truncate, session=self.info.id, length=length), replies.Done)
        if self.at is not None and length < self.at.end:
            self.stopped_at(None)

    def keep_record(self, body: bytes = b"", *, name: str = "") -> Steps[str]:
        """Keeps the session's present point, with the caller's own bytes, and returns the record's name. See
        Client.keep_record."""
        request = build(requests.KeepRecord, session=self.info.id, body=body, record=name)
        return (yield from self.call(request, replies.RecordKept)).message.record

    def export(
        self, kv: bool | None, on_progress: OnProgress | None = None
    ) -> Steps[Delivery[replies.SessionExported]]:
        """`kv` None: with the KV only if the tokens do not determine it."""
        if kv is None:
            listed = yield from self.call(build(requests.ListEdits, session=self.info.id), replies.Edits)
            kv = self.info.foreign_kv or bool(listed.message.edits)
        request = build(requests.ExportSession, session=self.info.id, kv=kv)
        return (yield from self.call(request, replies.SessionExported, on_progress))

    def points(self) -> Steps[PointMap | None]:
        """The points of the model; None if it is not loaded."""
        if self._points is None:
            models = (yield from self.call(build(requests.ListModels), replies.Models)).message.models
            self._points = next((model.points for model in models if model.name == self.info.model), None)
        return self._points

    def signal(self, kind: SignalKind, *, expected_s: float | None = None, tool: str = "") -> Steps[None]:
        """See Session.signal. A signal has no reply, so none can be mixed with those of a stream."""
        message = signal_message(self.info.id, kind, expected_s, tool)
        self._expect_not_at_work()
        with self._turn:
            connection = yield from self._connected()
            yield from connection.tell(message)

    def pause(self, tier: Tier = "host") -> Steps[replies.PauseReply]:
        """Stops the session, even in the middle of a call, and moves its pages off the device, to "host" or "disk".
        Returns when they are there, with their number. The call's stream stays open, and continues at unpause() with
        the same next token; a call that is made meanwhile waits for that. May be called while a call runs. A restart of
        the daemon ends the pause.

        Raises InvalidRequest, OutOfMemory if the tier has no room, Retry.
        """
        request = build(requests.PauseSession, session=self.info.id, tier=tier)
        answer = yield from self._beside(request, replies.PauseReply)
        self.is_paused = True
        return answer.message

    def unpause(self) -> Steps[None]:
        """Lets a paused session go on from where pause() stopped it. A session that is not paused stays as it is. May
        be called while a call runs. Raises Retry."""
        yield from self._beside(build(requests.ResumeSession, session=self.info.id), replies.Done)
        self.is_paused = False

    def set_priority(self, priority: Class) -> Steps[None]:
        """The session has this class from now on. May be called while a call runs, which goes on in it.

        Raises InvalidRequest, QuotaExceeded for a higher class than the user may have, Retry."""
        yield from self._beside(build(requests.SetPriority, session=self.info.id, priority=priority), replies.Done)

    def why(self) -> Steps[Why]:
        """Why the session runs or waits, for people: see Why. May be called while a call runs."""
        request = build(requests.ExplainSession, session=self.info.id)
        return (yield from self._beside(request, replies.WhyReply)).message.why
