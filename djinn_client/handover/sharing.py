"""Weights from a client: a model in this process becomes one of the daemon's, without a file and without a copy there.

    ShareModel: configuration, tokenizer ──►     (the daemon's engine lays the model out)     ──► ShareDescribed: image
    (if the daemon has the same weights of this user already, this is the end)
    the image in a memfd, buffer after buffer: packed on the tensors' own device, or copied as they are; then sealed
    ShareWeights: its descriptor ──► Progress … ──► ModelReply

The daemon computes and streams from the pages that are filled here. They are then sealed, so that neither this process
nor the daemon can change them. torch is imported when a model is shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from djinn_client.admin.loading_line import loading_line
from djinn_client.arguments.options import PlacingOptions, build, placing_fields
from djinn_client.errors import DjinnError, InvalidRequest
from djinn_client.handover.content import digest
from djinn_client.handover.named_tensors import DTYPES, NamedTensors, dtype_name
from djinn_client.protocol import (
    Done,
    EndShare,
    ModelInfo,
    ModelReply,
    Progress,
    ShareDescribed,
    ShareModel,
    ShareWeights,
)
from djinn_client.transport.connection import Connection, OnProgress, about, connect
from djinn_client.transport.steps import run

if TYPE_CHECKING:
    from typing import Self, Unpack


class ModelHandle:
    """A model that this process shares. Holds a connection to the daemon: when it is closed, or lost for longer than
    the daemon's `session_grace`, no new session may use the model, and it goes with its last session."""

    def __init__(self, connection: Connection, share: str, info: ModelInfo) -> None:
        self.info = info
        self._connection = connection
        self._share = share

    @property
    def name(self) -> str:
        """The name by which sessions open the model."""
        return self.info.name

    def close(self) -> None:
        """Ends the sharing of the model. A second time does nothing."""
        if self._connection.closed:
            return
        try:
            run(self._connection.call(build(EndShare, share=self._share), Done))
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # the caller must see the first error
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def share_model(
    model: Any,
    config: Any = None,
    tokenizer: Any = None,
    *,
    name: str = "",
    dtype: str = "auto",
    kv_bytes: int = 0,
    public: bool = False,
    on_progress: OnProgress | None = None,
    address: str | None = None,
    token: str | None = None,
    reuse: bool = False,
    **placing: Unpack[PlacingOptions],
) -> ModelHandle:
    """Hands a model to the daemon, which then serves it under `name` (or a name that it makes up) to this user, or with
    `public` to all users.

    model       a transformers model; or its tensors by the names of its state_dict, of any device: a dict, another
                Mapping or a function that makes the tensor of a name. A tensor is asked for once, block after block,
                so that what makes them need not have them all (and once more where blocks cannot be packed)
    config      the model's PretrainedConfig, or a dict; None: the transformers model's own
    tokenizer   a fast tokenizer of transformers, with its chat templates; a tokenizers.Tokenizer, the path of a
                tokenizer.json; None: the model takes and gives token ids only
    dtype       what it is computed in; "auto": as its weights, on a CPU float32
    reuse       True: weights that this user shares in the same way already, from this process or another, are not
                sent again. The daemon compares a digest of all tensors, so a model or a dict of them is needed

    `kv_bytes`, `on_progress` and `placing` are as for `load`, and `token` is as for `Session`. `on_progress` is also
    told of the weights that are filled in ("sharing") and sent ("sending"); without it, a terminal shows a progress
    line. The tensors are not needed any more when this returns.

    Raises InvalidRequest for wrong arguments, ModelRejected with the tensor at fault, OutOfMemory with the
    figure, ConnectionLost.
    """
    tensors = NamedTensors.of(model)
    if config is None:
        config = getattr(model, "config", None)
    files = _files(config, getattr(model, "generation_config", None), tokenizer)
    wanted = build(
        ShareModel,
        model=name,
        files={file: len(content) for file, content in files.items()},
        stored=tensors.dtype or _dtype_of(config),
        dtype=dtype,
        kv_bytes=kv_bytes,
        placing=placing_fields(placing) or {},
        public=public,
        content=digest(files, tensors) if reuse else "",
    )
    connection = run(connect(address, token))
    try:
        with loading_line(on_progress) as told:
            return _share(connection, wanted, b"".join(files.values()), tensors, told)
    except BaseException:
        connection.close()
        raise


def _share(
    connection: Connection, wanted: ShareModel, files: bytes, tensors: NamedTensors, on_progress: OnProgress | None
) -> ModelHandle:
    from djinn_client.handover.image_filling import fill, seal  # and with them torch
    from djinn_client.handover.packed import Unpackable

    while True:
        with _memory("djinn-files") as fd:
            _write(fd, files)
            described = run(connection.call(wanted, ShareDescribed, on_progress, [fd])).message
        if described.ready is not None:
            return ModelHandle(connection, described.share, described.ready)

        def tell(done: int, total: int, model: str = described.model) -> None:
            if on_progress is not None:
                on_progress(Progress(id=0, model=model, stage="sharing", done=done, total=total))

        with _memory("djinn-weights") as fd:
            try:
                fill(fd, described.image, tensors, tell)
            except Unpackable:
                run(connection.call(build(EndShare, share=described.share), Done))
                wanted.placing = msgspec.structs.replace(wanted.placing, packing=False)
                continue
            seal(fd)
            request = build(ShareWeights, share=described.share)
            on_sharing = about(described.model, on_progress)
            info = run(connection.call(request, ModelReply, on_sharing, [fd])).message.model
        return ModelHandle(connection, described.share, info)


@contextmanager
def _memory(name: str) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(fd: int, content: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(content)


# --- the other files of a checkpoint's folder -----------------------------------------------------------------------


def _files(config: Any, generation: Any, tokenizer: Any) -> dict[str, bytes]:
    """The files of a checkpoint's folder, but for the weights. Raises InvalidRequest."""
    if config is None:
        raise InvalidRequest("the configuration is missing: a PretrainedConfig or a dict", field="config")
    files = {"config.json": _json("config", config)}
    if generation is not None:
        files["generation_config.json"] = _json("generation_config", generation)
    if tokenizer is not None:
        files["tokenizer.json"] = _tokenizer(tokenizer)
        files |= _of_chats(tokenizer)
    return files


def _of_chats(tokenizer: Any) -> dict[str, bytes]:
    """The files with a tokenizer's chat templates and with its special tokens by name."""
    template = getattr(tokenizer, "chat_template", None)
    named = getattr(tokenizer, "special_tokens_map", None)
    settings = {name: str(token) for name, token in named.items() if name.endswith("_token")} if named else {}
    if isinstance(template, dict):
        templates = [{"name": name, "template": text} for name, text in template.items()]
        return {"tokenizer_config.json": msgspec.json.encode({**settings, "chat_template": templates})}
    files = {"tokenizer_config.json": msgspec.json.encode(settings)} if settings else {}
    return files | ({"chat_template.jinja": template.encode()} if isinstance(template, str) else {})


def _json(field: str, config: Any) -> bytes:
    if isinstance(config, dict):
        try:
            return msgspec.json.encode(config)
        except TypeError as error:
            raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field=field) from error
    if not callable(to_json := getattr(config, "to_json_string", None)):
        raise InvalidRequest(f"{field} must be a PretrainedConfig or a dict, not {type(config).__name__}", field=field)
    text: str = to_json()
    return text.encode()


def _tokenizer(tokenizer: Any) -> bytes:
    if isinstance(tokenizer, str | os.PathLike):
        try:
            return Path(tokenizer).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"the tokenizer {tokenizer} cannot be read: {error}", field="tokenizer") from error
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not callable(to_str := getattr(fast, "to_str", None)):
        raise InvalidRequest(
            f"a {type(tokenizer).__name__} cannot be handed over: give a fast tokenizer of transformers, a "
            "tokenizers.Tokenizer, or the path of a tokenizer.json",
            field="tokenizer",
        )
    text: str = to_str()
    return text.encode()


def _dtype_of(config: Any) -> str:
    """Raises InvalidRequest where the configuration does not say."""
    fields = config if isinstance(config, dict) else vars(config)
    for key in ("dtype", "torch_dtype"):
        if (dtype := dtype_name(fields.get(key))) in DTYPES:
            return dtype
    raise InvalidRequest(
        "of tensors that are made when they are asked for, the configuration must say the dtype: one of "
        f"{', '.join(DTYPES)}",
        field="config",
    )
