"""Handlers of requests about models: to list, plan, load and unload them, and to share them.

The handlers check that the client may make the request and that its values are valid. models.py and sharing.py do the
work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from msgspec.structs import replace

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, NotPermitted, Retry
from djinn_client.protocol import FilesHandedOver, ModelReply, PlanReply, ShareDescribed
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.admission import admission
from djinnd.server.loading.models import ModelTable, ServedModel, expect_open
from djinnd.server.loading.sharing import ShareTable
from djinnd.server.models.kv_sizes import KvSizes
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.request_handler import handles

_WISHES = ("kv_bytes", "host_kv_bytes", "disk_kv_bytes", "placing", "keep_alive_s", "chat_template")  # in a LoadModel
_SECOND_CHANCE = 600.0  # seconds until a user that is no administrator may load a model again that was set aside


@dataclass(eq=False)
class ModelRequests:
    _sessions: SessionTable
    _models: ModelTable
    _adapters: AdapterTable
    _sharing: ShareTable
    _status: Status

    @handles(protocol.ListModels)
    async def list_models(self, call: ClientCall, request: protocol.ListModels) -> protocol.Models:
        return protocol.Models(id=call.id, models=await self._status.model_infos(self._models.visible(call.client)))

    @handles(protocol.LoadModel, is_new_work=True)
    async def load(self, call: ClientCall, request: protocol.LoadModel) -> ModelReply:
        admission.check_load(request)
        kv = KvSizes(request.kv_bytes, request.host_kv_bytes, request.disk_kv_bytes)
        model = await self._models.named(request.model, call.client)
        expect_open(model)
        if not model.is_of(call.client):
            return await self._load_as_it_is(call, request, model)
        call.client.tenant.expect_tiers(request.host_kv_bytes, request.disk_kv_bytes)
        if model.state in ("loading", "ready", "asleep"):
            loaded = f"{model.name} is {'being loaded' if model.state == 'loading' else 'loaded'} already"
            if kv.over(model.kv) != model.kv:
                raise InvalidRequest(f"{loaded}: unload it first, to give it other KV memory")
            if model.placed(request.placing) != model.placing:
                raise InvalidRequest(f"{loaded}: unload it first, to change the placement of its blocks")
            if request.chat_template not in ("", model.template):
                raise InvalidRequest(f"{loaded}: unload it first, to give it another chat template")
            if request.keep_alive_s not in (None, model.keep_alive):
                self._expect_own(model, call.client)
                self._models.set_keep_alive(model, request.keep_alive_s)
        if model.state == "set aside":
            self._expect_second_chance(model, call.client)
            self._models.try_again(model)
        user = call.client.user
        wishes = (kv, request.placing, request.keep_alive_s, user, request.chat_template)
        await self._models.ready(model.name, call.tell_loading, *wishes)
        model = self._models.find(model.name)
        return ModelReply(id=call.id, model=self._status.model_info(model))

    async def _load_as_it_is(self, call: ClientCall, request: protocol.LoadModel, model: ServedModel) -> ModelReply:
        """Loads the model as configured, for a client that may use it but not choose its settings. The reply says which
        settings were ignored."""
        await self._models.ready(model.name, call.tell_loading)
        model = self._models.find(model.name, call.client)
        wishes = [name for name in _WISHES if getattr(request, name) not in (0, None, "")]
        if not wishes:
            return ModelReply(id=call.id, model=self._status.model_info(model))
        info = await self._status.complete_info(model)
        note = f"{', '.join(wishes)}: ignored, as only {_deciders(model)} may set that"
        return ModelReply(id=call.id, model=replace(info, notes=[*info.notes, note]))

    @handles(protocol.PlanModel, is_new_work=True)
    async def plan(self, call: ClientCall, request: protocol.PlanModel) -> PlanReply:
        admission.check_plan(request)
        model = await self._models.named(request.model, call.client)
        plan = await self._models.lifecycle.plan(model, request.memory_bytes, request.kv_bytes, request.placing)
        return PlanReply(id=call.id, plan=plan)

    @handles(protocol.UnloadModel)
    async def unload(self, call: ClientCall, request: protocol.UnloadModel) -> None:
        model = await self._models.named(request.model, call.client)
        self._expect_own(model, call.client)
        self._models.lifecycle.drafts.expect_unused(model)
        sessions = self._sessions.of_model(model.name)
        used = sum(session.kept is None or session.call is not None for session in sessions)
        if used and not request.force:
            raise InvalidRequest(f"{used} sessions use {model.name}: close them, or unload it with force")
        for session in sessions:
            self._sessions.close(session)
        if model.share is not None:
            await self._sharing.withdraw(model.share)
        else:
            await self._models.lifecycle.unload(model)

    def _expect_own(self, model: ServedModel, client: ConnectedClient) -> None:
        """Raises NotPermitted if the model does not belong to the client, or other users have sessions of it."""
        if not model.is_of(client):
            raise NotPermitted(f"{model.name} is not yours: only {_deciders(model)} may do that")
        if not client.is_admin and any(s.user != client.user for s in self._sessions.of_model(model.name)):
            raise NotPermitted(f"other users have sessions of {model.name}: only an administrator may do that")

    @handles(protocol.HandOverFiles, is_new_work=True)
    async def hand_over_files(self, call: ClientCall, request: protocol.HandOverFiles) -> FilesHandedOver:
        if request.adapter_of:
            base = await self._models.named(request.adapter_of, call.client)
            adapter = await self._adapters.take(base, call.client, request, call.take_descriptors())
            return FilesHandedOver(id=call.id, model=adapter.name)
        model = await self._models.folders.take(call.client, request, call.take_descriptors())
        return FilesHandedOver(id=call.id, model=model.name)

    def _expect_second_chance(self, model: ServedModel, client: ConnectedClient) -> None:
        """Checks that the client may load a model that is set aside. Raises NotPermitted, and Retry if its user has
        tried that recently."""
        if client.is_admin:
            return
        self._expect_own(model, client)
        if model.is_configured:
            raise NotPermitted(f"{model.error} (only an administrator may do that with a model of the configuration)")
        left = model.failed_at + _SECOND_CHANCE - time.monotonic()
        if left > 0:
            told = f"{model.error} (an administrator may do that at once, others in {left:.0f} s)"
            raise Retry(told, retry_s=round(left, 3))

    # --- shares -------------------------------------------------------------------------------------------------------

    @handles(protocol.ShareModel, is_new_work=True)
    async def share_model(self, call: ClientCall, request: protocol.ShareModel) -> ShareDescribed:
        admission.check_share(request)
        if (joined := await self._sharing.join(call.client, request, call.tell_loading)) is not None:
            assert joined.image is not None, "a share with weights is described"
            ready = self._status.model_info(self._models.find(joined.model))
            return ShareDescribed(id=call.id, share=joined.id, model=joined.model, image=joined.image, ready=ready)
        self._sharing.check(call.client, request)
        share, image = await self._sharing.describe(call.client, request, os.dup(call.descriptor))
        return ShareDescribed(id=call.id, share=share.id, model=share.model, image=image)

    @handles(protocol.ShareWeights, is_new_work=True)
    async def share_weights(self, call: ClientCall, request: protocol.ShareWeights) -> ModelReply:
        model = await self._sharing.accept(call.client, request.share, call.descriptor, call.tell_loading)
        return ModelReply(id=call.id, model=self._status.model_info(model))

    @handles(protocol.EndShare)
    async def end_share(self, call: ClientCall, request: protocol.EndShare) -> None:
        await self._sharing.end(call.client, request.share)


def _deciders(model: ServedModel) -> str:
    return "administrators" if model.is_configured else "its owner or an administrator"
