"""Checkpoint folders that a caller names. The daemon opens no folder with more rights than the caller has: it asks for
the files, and the caller's process opens them and hands them over.

    LoadModel "/home/me/model" ──► FilesWanted
    HandOverFiles, with the open files ──► FilesHandedOver: the model's name
    LoadModel with that name ──► …
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from djinn_client.arguments.options import build
from djinn_client.errors import FilesWanted, InvalidRequest
from djinn_client.files.model_files import ModelFiles
from djinn_client.files.pulled import pulled_folder
from djinn_client.protocol import replies, requests
from djinn_client.transport.connection import Connection, OnProgress
from djinn_client.transport.exchange import Delivery
from djinn_client.transport.steps import Steps

R = TypeVar("R", bound=replies.Reply)

HasModel = (
    requests.OpenSession
    | requests.ImportSession
    | requests.LoadModel
    | requests.PlanModel
    | requests.UnloadModel
    | requests.LoadAdapter
    | requests.UnloadAdapter
    | requests.Tokenize
    | requests.Detokenize
    | requests.DescribeTokenizer
    | requests.Embed
)
NamesModel = HasModel | requests.Generate  # a Generate names its model in its conversation
N = TypeVar("N", bound=NamesModel)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TRIES = 3  # another client may unload the model between two requests


def model_name(model: Any) -> Any:
    """The name that the daemon is told. A folder is named by its absolute path. A folder is what begins with `/`, `~`
    or `.`, and an existing path with a slash, even if it could be a hub id. Everything else is named as it is."""
    if not isinstance(model, str | os.PathLike):
        return model
    name = os.fspath(model)
    if name in (".", "..") or name.startswith(("/", "~", "./", "../")) or ("/" in name and os.path.exists(name)):
        return "/" + os.path.abspath(os.path.expanduser(name)).lstrip("/")
    return name


def call(
    connection: Connection,
    request: NamesModel,
    expected: type[R],
    on_progress: OnProgress | None = None,
    fds: Sequence[int] = (),
) -> Steps[Delivery[R]]:
    """Does what `connection.call` does, and hands over the files of the request's model if the daemon asks for them.
    The request names the model as `model_name` says. A hub id that `djinnctl pull` has fetched stands for its folder if
    the daemon is on this machine; another machine has models of its own. Also raises ModelNotFound for a hub id whose
    download broke off, and ModelNotFound, ModelRejected or InvalidRequest for a folder that this process cannot
    open."""
    if connection.passes_files and (pulled := pulled_folder(_model_of(request))) is not None:
        request = _with_model(request, pulled)
    folder = _model_of(request)
    adapter = _adapter_of(request)
    for _ in range(_TRIES * (1 + bool(adapter))):
        try:
            return (yield from connection.call(request, expected, on_progress, fds))
        except FilesWanted as wanted:
            is_adapter = bool(adapter) and wanted.data.get("folder") in (adapter, _adapter_of(request))
            named = adapter if is_adapter else folder
            if not named.startswith("/"):
                raise
            if not connection.passes_files:
                remedy = "name an adapter" if is_adapter else "name a model"
                raise InvalidRequest(
                    f"{named} is a folder of this machine, and the daemon at {connection.address} cannot read it: "
                    f"{remedy} that it serves, or hand the weights over with share_model",
                    model=named,
                ) from None
        if is_adapter:
            assert isinstance(request, requests.OpenSession | requests.LoadAdapter)
            request.adapter = yield from _hand_over(connection, adapter, request.model)
        else:
            request = _with_model(request, (yield from _hand_over(connection, folder)))
    return (yield from connection.call(request, expected, on_progress, fds))


def _model_of(request: NamesModel) -> str:
    if isinstance(request, requests.Generate):
        assert request.conversation is not None, "a Generate on a session names no model"
        return request.conversation.model
    return request.model


def _adapter_of(request: NamesModel) -> str:
    return request.adapter if isinstance(request, requests.OpenSession | requests.LoadAdapter) else ""


def _with_model(request: N, model: str) -> N:
    """The same request, which names the model so from now on."""
    if isinstance(request, requests.Generate):
        assert request.conversation is not None
        request.conversation = msgspec.structs.replace(request.conversation, model=model)
    else:
        request.model = model
    return request


def _hand_over(connection: Connection, folder: str, adapter_of: str = "") -> Steps[str]:
    """Hands over a checkpoint's files, or those of an adapter of the model `adapter_of`. Returns the daemon's name for
    it."""
    with ModelFiles.open(folder) as files:
        if adapter_of:
            files.keep(ADAPTER_FILES)
        request = build(requests.HandOverFiles, folder=folder, names=list(files), adapter_of=adapter_of)
        request.others = [] if adapter_of else files.others
        descriptors = [files.descriptor(name) for name in files]
        return (yield from connection.call(request, replies.FilesHandedOver, fds=descriptors)).message.model
