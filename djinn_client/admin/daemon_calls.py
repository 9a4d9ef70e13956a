"""Calls on the daemon itself: its models, sessions, quotas and tokens, and calls for which it chooses the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from djinn_client.admin import stateless
from djinn_client.admin.embeddings import Embeddings
from djinn_client.admin.stateless import ConversedChatOptions, ConversedOptions
from djinn_client.arguments import folders
from djinn_client.arguments.messages import Message, chat_input
from djinn_client.arguments.options import OfChats, PlacingOptions, build, placing_fields, token_ids
from djinn_client.protocol import (
    AdapterInfo,
    Class,
    ModelInfo,
    PrefixInfo,
    RecordInfo,
    SessionInfo,
    Tier,
    TokenInfo,
    replies,
    requests,
)
from djinn_client.protocol.fields.placing import ModelPlan
from djinn_client.protocol.fields.scheduling import QuotaUse, Why
from djinn_client.transport.connection import Connection, OnProgress, connect
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from typing import Unpack

R = TypeVar("R", bound=replies.Reply)
ShownProgress: TypeAlias = AbstractContextManager[OnProgress | None]


class DaemonCalls:
    """These calls as steps, which `Client` and `AsyncClient` run. A call takes a connection that is free, or makes one.
    Connections are kept for the calls that follow."""

    def __init__(
        self, address: str | None, token: str | None, progress: Callable[[OnProgress | None], ShownProgress]
    ) -> None:
        """`progress` shows how far a model is loaded, for calls without an `on_progress` of their own."""
        self._address = address
        self._token = token
        self._progress = progress
        self._idle: list[Connection] = []  # of all threads: append and pop are atomic

    def ping(self) -> Steps[None]:
        """An empty call."""
        yield from self._call(build(requests.Ping), replies.Done)

    def welcome(self) -> Steps[replies.Welcome]:
        """The daemon's introduction: its version, and the caller's principal."""
        connection = yield from self._taken()
        self._idle.append(connection)
        return connection.welcome

    def status(self, *, check: bool = False) -> Steps[replies.StatusReply]:
        """`check` also audits the daemon's pools; `integrity` then has the findings."""
        return self._call(build(requests.GetStatus, check=check), replies.StatusReply)

    def models(self) -> Steps[list[ModelInfo]]:
        return (yield from self._call(build(requests.ListModels), replies.Models)).models

    def points(self, model: str) -> Steps[list[str]]:
        """The places in the model where sessions may look and change, one name for each, in the order of computing; see
        djinn_client.protocol.fields.points for the others. Loads the model if it is not loaded."""
        models = yield from self.models()
        known = next((info.points for info in models if info.name == folders.model_name(model)), None)
        known = known or (yield from self.load(model)).points
        return [] if known is None else list(known.names())

    def tokenize(
        self,
        model: str,
        said: str | Iterable[Message],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        **chat: Unpack[OfChats],
    ) -> Steps[list[int]]:
        """The tokens of a text that starts a session, or of a chat (see Session.chat) up to where the answer begins.
        `add_special` False: without the special tokens that the tokenizer puts around a text; `parse_special` False:
        control strings in the text stay text. Loads the model if it is not loaded. Raises NoTokenizer, InvalidRequest,
        TextFailed."""
        if isinstance(said, str):
            request = build(requests.Tokenize, model=folders.model_name(model), text=said, add_special=add_special)
            request.parse_special = parse_special
        else:
            request = build(requests.Tokenize, model=folders.model_name(model))
            request.chat = chat_input(said, **chat)
        return (yield from self._call(request, replies.Tokenized)).token_ids

    def detokenize(self, model: str, tokens: Iterable[int]) -> Steps[str]:
        """The text of these tokens, special tokens included. Raises as `tokenize`."""
        request = build(requests.Detokenize, model=folders.model_name(model), token_ids=token_ids(tokens))
        return (yield from self._call(request, replies.Detokenized)).text

    def tokenizer(self, model: str) -> Steps[replies.TokenizerInfo]:
        """A description of the model's tokenizer: whether it has text and a chat template, and its special tokens."""
        return self._call(build(requests.DescribeTokenizer, model=folders.model_name(model)), replies.TokenizerInfo)

    def generate(
        self,
        model: str,
        prompt: str | Iterable[int],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[ConversedOptions],
    ) -> Steps[replies.Generated]:
        """Generates from a whole prompt, a text or token ids. The daemon chooses the session that shares the longest
        prefix with it, computes the rest, and keeps the session for the next such call. The reply's `session` names it,
        for `attach`. docs/guide/conversations.md says how the session is chosen and how long it is kept. The options
        are those of `ConversedOptions`.

        Raises what `Session` and `Session.generate` raise."""
        request = stateless.conversed(model, prompt, options)
        return self._loading_call(request, replies.Generated, on_progress)

    def chat(
        self,
        model: str,
        said: str | Iterable[Message],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[ConversedChatOptions],
    ) -> Steps[replies.Generated]:
        """Does for a chat what `generate` does for a prompt. A text is the chat's only message; a list of messages, in
        OpenAI's form, is the whole chat. The options are those of `ConversedChatOptions`."""
        request = stateless.conversed_chat(model, said, options)
        return self._loading_call(request, replies.Generated, on_progress)

    def embed(
        self,
        model: str,
        inputs: str | Iterable[str | Iterable[int]],
        *,
        pooling: stateless.Pooling | None = None,
        normalize: bool = True,
        on_progress: OnProgress | None = None,
    ) -> Steps[Embeddings]:
        """A vector for each of up to 2,048 texts, or rows of token ids: the mean of the final norm's output over the
        input's tokens, or with `pooling="last"` the row of the last token (None: as configured for the model). It has
        length 1 unless `normalize` is False. See docs/guide/embeddings.md.

        Raises what `Session` raises, and PromptTooLong."""
        request = stateless.embed(model, inputs, pooling, normalize)
        return Embeddings((yield from self._loading_call(request, replies.Embedded, on_progress)))

    def keep_record(self, session: str, body: bytes = b"", *, name: str = "") -> Steps[str]:
        """Keeps the present point of an idle session of the caller, with the caller's own bytes, and returns the
        record's name (name "": the daemon makes one up). A record of the caller with that name is replaced. A call with
        `after=name` continues from there, even if the session has changed or is closed.

        Raises SessionNotFound, SessionBusy, QuotaExceeded, and InvalidRequest for a session with edits, breakpoints or
        imported KV, because its tokens do not determine its output."""
        request = build(requests.KeepRecord, session=session, body=body, record=name)
        return (yield from self._call(request, replies.RecordKept)).record

    def record(self, name: str) -> Steps[replies.Record]:
        """The record, with its `body`. Raises NotFound."""
        return self._call(build(requests.GetRecord, record=name), replies.Record)

    def records(self) -> Steps[list[RecordInfo]]:
        """The caller's records, the oldest first."""
        return (yield from self._call(build(requests.ListRecords), replies.Records)).records

    def drop_record(self, name: str) -> Steps[None]:
        """Raises NotFound."""
        yield from self._call(build(requests.DropRecord, record=name), replies.Done)

    def sessions(self) -> Steps[list[SessionInfo]]:
        """The caller's sessions; every user's for an administrator."""
        return (yield from self._call(build(requests.ListSessions), replies.Sessions)).sessions

    def quotas(self, *, all: bool = False) -> Steps[list[QuotaUse]]:
        """The caller's quotas and their use; with `all`, for administrators, those of every user that has a session."""
        return (yield from self._call(build(requests.GetQuotas, all=all), replies.Quotas)).quotas

    def load(
        self,
        model: str,
        *,
        kv_bytes: int = 0,
        host_kv_bytes: int | None = None,
        disk_kv_bytes: int | None = None,
        keep_alive_s: float | None = None,
        chat_template: str = "",
        on_progress: OnProgress | None = None,
        **placing: Unpack[PlacingOptions],
    ) -> Steps[ModelInfo]:
        """Returns when the model is ready. `kv_bytes` 0: the daemon chooses the size of the page pool. `host_kv_bytes`
        and `disk_kv_bytes` None: likewise, for pages that have left the device; 0: none. `placing`: see PlacingOptions.
        A model that is already loaded in another way is an InvalidRequest; one that does not fit is OutOfMemory.
        `keep_alive_s`: after this time without a call the model goes to sleep. It gives its device memory back until
        the next call, and its sessions stay. 0: never; None: as configured. It may also be changed for a loaded model;
        if other users have sessions of that, only by an administrator (NotPermitted). `chat_template`: the text of a
        template that replaces the checkpoint's."""
        sizes = {"kv_bytes": kv_bytes, "host_kv_bytes": host_kv_bytes, "disk_kv_bytes": disk_kv_bytes}
        wishes = {"keep_alive_s": keep_alive_s, "chat_template": chat_template, "placing": placing_fields(placing)}
        request = build(requests.LoadModel, model=folders.model_name(model), **wishes, **sizes)
        return (yield from self._loading_call(request, replies.ModelReply, on_progress)).model

    def plan(
        self, model: str, *, memory_bytes: int = 0, kv_bytes: int = 0, **placing: Unpack[PlacingOptions]
    ) -> Steps[ModelPlan]:
        """The memory that loading the model would take now, beside the models that are loaded, and how fast it would
        run. `memory_bytes` assumes that much device memory and no other models. Loads nothing, and frees nothing.
        `placing`: see PlacingOptions. Raises OutOfMemory with the figure if nothing fits."""
        fields = placing_fields(placing)
        request = build(
            requests.PlanModel,
            model=folders.model_name(model),
            memory_bytes=memory_bytes,
            kv_bytes=kv_bytes,
            placing=fields,
        )
        return (yield from self._call(request, replies.PlanReply)).plan

    def set_budget(self, memory_bytes: int) -> Steps[replies.BudgetReply]:
        """Changes the daemon's device memory, for administrators, while sessions run: blocks that no longer fit stream,
        and become resident again when there is more. Raises OutOfMemory with the smallest possible budget if this one
        does not suffice; nothing has changed then."""
        return self._call(build(requests.SetBudget, memory_bytes=memory_bytes), replies.BudgetReply)

    def trace(self, *, steps: int = 4, seconds: float = 10.0) -> Steps[replies.TraceReply]:
        """Records what the device does in its next `steps` steps (1 to 100), for administrators. Returns after these
        steps, or after `seconds` (at most 60) with the steps so far. Raises Retry while another trace is recorded."""
        return self._call(build(requests.GetTrace, steps=steps, seconds=seconds), replies.TraceReply)

    def unload(self, model: str, *, force: bool = False) -> Steps[None]:
        """`force` closes the sessions that use the model; without it they are an error."""
        yield from self._call(build(requests.UnloadModel, model=folders.model_name(model), force=force), replies.Done)

    def adapters(self) -> Steps[list[AdapterInfo]]:
        """The configured LoRA adapters, and those that the caller has used; all of them for an administrator."""
        return (yield from self._call(build(requests.ListAdapters), replies.Adapters)).adapters

    def load_adapter(
        self, model: str, adapter: str | os.PathLike[str], *, on_progress: OnProgress | None = None
    ) -> Steps[AdapterInfo]:
        """Loads a LoRA adapter, and its model, before a session needs them. `adapter` is a PEFT folder, or a name from
        the model's configuration. Calls without a session name the model and the adapter as `MODEL:ADAPTER`, with the
        `name` of the reply. Raises AdapterNotFound, ModelRejected, QuotaExceeded, and what `load` raises."""
        named = {"model": folders.model_name(model), "adapter": folders.model_name(adapter)}
        request = build(requests.LoadAdapter, **named)
        return (yield from self._loading_call(request, replies.AdapterReply, on_progress)).adapter

    def unload_adapter(self, model: str, adapter: str) -> Steps[None]:
        """Frees the memory of an adapter, by its name in `adapters()`. Raises InvalidRequest while sessions use it,
        AdapterNotFound, NotPermitted."""
        request = build(requests.UnloadAdapter, model=folders.model_name(model), adapter=adapter)
        yield from self._call(request, replies.Done)

    def close_session(self, session: str) -> Steps[None]:
        """Raises SessionNotFound."""
        yield from self._call(build(requests.CloseSession, session=session), replies.Done)

    def pause_session(self, session: str, tier: Tier = "host") -> Steps[replies.PauseReply]:
        """Pauses a session of the caller, or of any user for an administrator. See Session.pause. Also raises
        SessionNotFound."""
        return self._call(build(requests.PauseSession, session=session, tier=tier), replies.PauseReply)

    def unpause_session(self, session: str) -> Steps[None]:
        """See Session.unpause. Raises SessionNotFound."""
        yield from self._call(build(requests.ResumeSession, session=session), replies.Done)

    def set_priority(self, session: str, priority: Class) -> Steps[None]:
        """Changes the class of a session of the caller, or of any user for an administrator. See Session.set_priority.
        Also raises SessionNotFound."""
        yield from self._call(build(requests.SetPriority, session=session, priority=priority), replies.Done)

    def why(self, session: str) -> Steps[Why]:
        """Why a session of the caller, or of any user for an administrator, runs or waits. See Session.why."""
        return (yield from self._call(build(requests.ExplainSession, session=session), replies.WhyReply)).why

    def publish_prefix(self, session: str, tokens: int | None = None) -> Steps[PrefixInfo]:
        """Makes the first `tokens` tokens of a session public (None: all that it has), as far as they fill pages, for
        administrators. From now on the sessions of all users that begin with them share their pages, until the prefix
        is withdrawn. Raises InvalidRequest, with the page size, if they do not fill a page; SessionNotFound,
        SessionBusy."""
        request = build(requests.PublishPrefix, session=session, tokens=tokens)
        return (yield from self._call(request, replies.PrefixPublished)).prefix

    def prefixes(self) -> Steps[list[PrefixInfo]]:
        """The public prefixes of all models, for administrators."""
        return (yield from self._call(build(requests.ListPrefixes), replies.Prefixes)).prefixes

    def withdraw_prefix(self, prefix: str) -> Steps[bool]:
        """For administrators. True: the model is loaded, and goes on sharing it until it is loaded the next time.
        Raises NotFound."""
        return (yield from self._call(build(requests.WithdrawPrefix, prefix=prefix), replies.PrefixWithdrawn)).in_force

    def add_token(
        self, name: str, *, user: str = "", highest_class: Class | None = None, expires_s: float = 0.0
    ) -> Steps[replies.TokenAdded]:
        """Adds a token, for administrators; only this reply has the `token` itself. It stands for the Unix user `user`,
        or, if that is "", for a principal of this name. Connections with it use sessions of `highest_class` or below
        (None: of any class that the principal may have), and it ends after `expires_s` seconds (0: never). See
        docs/guide/tokens.md. Raises InvalidRequest for a name that is taken or invalid, QuotaExceeded, Retry if it
        cannot be written."""
        return self._call(
            build(requests.AddToken, name=name, user=user, highest_class=highest_class, expires_s=expires_s),
            replies.TokenAdded,
        )

    def tokens(self) -> Steps[list[TokenInfo]]:
        """All tokens, for administrators."""
        return (yield from self._call(build(requests.ListTokens), replies.TokensListed)).tokens

    def revoke_token(self, name: str) -> Steps[None]:
        """Ends the token and closes the connections with it, for administrators. Raises NotFound."""
        yield from self._call(build(requests.RevokeToken, name=name), replies.Done)

    def restart(self, *, warm: bool = False) -> Steps[None]:
        """Restarts the daemon after running calls have ended, for administrators; `warm` keeps the loaded models, and
        the pages of sessions, in shared memory. Returns when the restart has begun. Sessions survive it, for
        limits.session_grace."""
        yield from self._call(build(requests.Restart, warm=warm), replies.Done)

    def close(self) -> None:
        with suppress(IndexError):  # until there is none
            while True:
                self._idle.pop().close()

    def _call(self, request: requests.Request, expected: type[R], on_progress: OnProgress | None = None) -> Steps[R]:
        connection = yield from self._taken()
        try:
            if isinstance(request, folders.NamesModel):
                return (yield from folders.call(connection, request, expected, on_progress)).message
            return (yield from connection.call(request, expected, on_progress)).message
        finally:
            if connection.closed:
                self.close()  # the others are likely to be lost, too
            else:
                self._idle.append(connection)

    def _loading_call(self, request: requests.Request, expected: type[R], on_progress: OnProgress | None) -> Steps[R]:
        """For calls that load a model: see `Session`."""
        with self._progress(on_progress) as told:
            return (yield from self._call(request, expected, told))

    def _taken(self) -> Steps[Connection]:
        with suppress(IndexError):  # another thread may take the last one
            while (connection := self._idle.pop()).closed:
                pass
            return connection
        return (yield from connect(self._address, self._token))
