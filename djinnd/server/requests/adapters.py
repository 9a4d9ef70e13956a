"""Handlers of requests about LoRA adapters: to list them, and to load and unload one."""

from __future__ import annotations

from dataclasses import dataclass

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, NotPermitted
from djinn_client.protocol import AdapterInfo, AdapterReply, Adapters
from djinnd.server.adapters.adapter import Adapter
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.loading.models import ModelTable, expect_open
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles


@dataclass(eq=False)
class AdapterRequests:
    _models: ModelTable
    _adapters: AdapterTable

    @handles(protocol.ListAdapters)
    async def list_adapters(self, call: ClientCall, request: protocol.ListAdapters) -> Adapters:
        return Adapters(id=call.id, adapters=[self._info(each) for each in self._adapters.visible(call.client)])

    @handles(protocol.LoadAdapter, is_new_work=True)
    async def load(self, call: ClientCall, request: protocol.LoadAdapter) -> AdapterReply:
        model = await self._models.named(request.model, call.client)
        expect_open(model)
        adapter = await self._adapters.named(model, request.adapter, call.client)
        if adapter is None:
            raise InvalidRequest("an adapter is named by its folder, or as configured", field="adapter")
        await self._models.ready(model.name, call.tell_loading, user=call.client.user)
        await self._adapters.load(adapter)
        return AdapterReply(id=call.id, adapter=self._info(adapter))

    @handles(protocol.UnloadAdapter)
    async def unload(self, call: ClientCall, request: protocol.UnloadAdapter) -> None:
        model = await self._models.named(request.model, call.client)
        adapter = self._adapters.find(model, request.adapter, call.client)
        if adapter.owner != call.client.user and not call.client.is_admin:
            raise NotPermitted(f"{adapter.name} is not yours: only its owner or an administrator may unload it")
        if sessions := self._adapters.sessions_of(adapter):
            raise InvalidRequest(f"{len(sessions)} sessions use {adapter.name}: close them first")
        self._adapters.drop(adapter)

    def _info(self, adapter: Adapter) -> AdapterInfo:
        return AdapterInfo(
            name=adapter.name,
            model=adapter.model,
            folder=adapter.folder,
            identity=adapter.identity.hex(),
            rank=adapter.rank,
            modules=adapter.modules,
            nbytes=adapter.nbytes,
            is_loaded=self._adapters.is_loaded(adapter),
            is_configured=adapter.is_configured,
            sessions=len(self._adapters.sessions_of(adapter)),
        )
