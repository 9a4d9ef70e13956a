"""Handlers of requests about the daemon as a whole: its status, and requests of administrators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from djinn_client import protocol
from djinn_client.errors import NotPermitted
from djinnd.messages import PublicPrefix, Trace
from djinnd.server.admission import admission
from djinnd.server.engines.supervisor import Supervisor
from djinnd.server.handover.stopping import Restart
from djinnd.server.loading.models import ModelTable
from djinnd.server.principals.tokens import Tokens
from djinnd.server.sessions.prefixes import Prefix, PrefixTable
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles


@dataclass(eq=False)
class DaemonRequests:
    """`_begin_restart` begins a restart. It raises InvalidRequest if the next daemon could not start."""

    _sessions: SessionTable
    _models: ModelTable
    _prefixes: PrefixTable
    _supervisor: Supervisor
    _status: Status
    _tokens: Tokens
    _begin_restart: Callable[[Restart], Awaitable[None]]
    _notes: Callable[[], list[str]]  # messages for administrators

    @handles(protocol.Ping)
    async def ping(self, call: ClientCall, request: protocol.Ping) -> None:
        """Answers, and does nothing else."""

    @handles(protocol.GetStatus)
    async def get_status(self, call: ClientCall, request: protocol.GetStatus) -> protocol.StatusReply:
        if request.check:
            _expect_admin(call, "have the daemon check itself")
        reply = await self._status.reply(call.id, request.check, call.client)
        reply.notes = self._notes() if call.client.is_admin else []
        return reply

    @handles(protocol.GetQuotas)
    async def get_quotas(self, call: ClientCall, request: protocol.GetQuotas) -> protocol.Quotas:
        if request.all:
            _expect_admin(call, "see the quotas of all users")
        users = {call.client.user, *(session.user for session in self._sessions if request.all)}
        uses = await self._status.quota_uses(sorted(users))
        if not request.all:  # for this connection: its token may allow less than the user's quota
            uses = [replace(use, highest_class=call.client.class_for(None)) for use in uses]
        return protocol.Quotas(id=call.id, quotas=uses)

    @handles(protocol.SetBudget, is_new_work=True)
    async def set_budget(self, call: ClientCall, request: protocol.SetBudget) -> protocol.BudgetReply:
        _expect_admin(call, "change the budget of device memory")
        admission.check_budget(request.memory_bytes)
        changed = await self._supervisor.set_budget(request.memory_bytes)
        return protocol.BudgetReply(
            id=call.id,
            budget_bytes=changed.budget_bytes,
            used_bytes=changed.used_bytes,
            seconds=changed.seconds,
            models=[self._status.model_info(model) for model in self._models if model.engine is not None],
        )

    @handles(protocol.GetTrace, is_new_work=True)
    async def trace(self, call: ClientCall, request: protocol.GetTrace) -> protocol.TraceReply:
        _expect_admin(call, "trace the device: it shows what all users do")
        admission.check_trace(request)
        engine = await self._supervisor.engine()
        traced = await engine.call(Trace, steps=request.steps, seconds=request.seconds)
        return protocol.TraceReply(id=call.id, device=engine.ready.result().device, spans=traced.spans)

    @handles(protocol.Restart, is_new_work=True)
    async def restart(self, call: ClientCall, request: protocol.Restart) -> None:
        """Begins a restart. The caller has its reply before the daemon drains and closes the connection."""
        _expect_admin(call, "restart the daemon")
        await self._begin_restart("warm" if request.warm else "cold")

    # --- tokens -------------------------------------------------------------------------------------------------------

    @handles(protocol.AddToken)
    async def add_token(self, call: ClientCall, request: protocol.AddToken) -> protocol.TokenAdded:
        _expect_admin(call, "add tokens")
        token, info = await self._tokens.add(request)
        return protocol.TokenAdded(id=call.id, token=token, info=info)

    @handles(protocol.ListTokens)
    async def list_tokens(self, call: ClientCall, request: protocol.ListTokens) -> protocol.TokensListed:
        _expect_admin(call, "list the tokens")
        return protocol.TokensListed(id=call.id, tokens=self._tokens.infos())

    @handles(protocol.RevokeToken)
    async def revoke_token(self, call: ClientCall, request: protocol.RevokeToken) -> None:
        """If this ends the caller's own connection, the caller gets the reason instead of the reply."""
        _expect_admin(call, "revoke tokens")
        await self._tokens.revoke(request.name)

    # --- public prefixes ----------------------------------------------------------------------------------------------

    @handles(protocol.PublishPrefix, is_new_work=True, journal="changes")
    async def publish_prefix(self, call: ClientCall, request: protocol.PublishPrefix) -> protocol.PrefixPublished:
        """Publishes a prefix and tells the engine. Nothing is awaited between the two: an engine that has the model is
        told here, and an engine that loads it later is told by the loader."""
        _expect_admin(call, "make a prefix public: other users' sessions share its pages")
        session = self._sessions.lookup(request.session, call.client)
        model = await self._models.once_ready(session)
        session.expect_idle()
        count = admission.public_tokens(request, len(session.tokens), model.described[0].page_size)
        shared = model.share is not None
        prefix = self._prefixes.publish(model.name, call.client.user, session.tokens[:count], shared)
        if model.engine is not None:  # else the loader tells the next engine
            model.engine.send(PublicPrefix(model.name, prefix.tokens))
        return protocol.PrefixPublished(id=call.id, prefix=self._info(prefix))

    @handles(protocol.ListPrefixes)
    async def list_prefixes(self, call: ClientCall, request: protocol.ListPrefixes) -> protocol.Prefixes:
        _expect_admin(call, "list the public prefixes")
        return protocol.Prefixes(id=call.id, prefixes=list(map(self._info, self._prefixes)))

    def _info(self, prefix: Prefix) -> protocol.PrefixInfo:
        return replace(prefix.info, user_name=self._status.name_of(prefix.user))

    @handles(protocol.WithdrawPrefix, journal="changes")
    async def withdraw_prefix(self, call: ClientCall, request: protocol.WithdrawPrefix) -> protocol.PrefixWithdrawn:
        _expect_admin(call, "withdraw a public prefix")
        prefix = self._prefixes.withdraw(request.prefix)
        in_force = any(model.name == prefix.model and model.engine is not None for model in self._models)
        return protocol.PrefixWithdrawn(id=call.id, in_force=in_force)


def _expect_admin(call: ClientCall, what: str) -> None:
    """Raises NotPermitted if the client is not an administrator."""
    if not call.client.is_admin:
        raise NotPermitted(f"only an administrator may {what}")
