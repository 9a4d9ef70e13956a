"""Models: what one would come to, how its image is to lie, its load, and its way out."""

from __future__ import annotations

import msgspec

from djinn_client.image import Dtype, Image
from djinn_client.placing import ModelPlan, Placing
from djinn_client.protocol import ModelInfo

# --- server to engine -----------------------------------------------------------------------------------------------


class Load(msgspec.Struct, tag="load"):
    request: int
    model: str
    path: str
    kv_bytes: int = 0  # 0: the engine decides
    host_kv_bytes: int | None = None  # of pages in host memory; None: the engine decides
    disk_kv_bytes: int | None = None  # of pages in files, likewise
    disk_folder: str = ""  # for those files; "": there are none
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_context: int = 0  # 0: the model's own
    placing: Placing = Placing()
    shared: Dtype | None = None  # the dtype that a client has given its weights in; None: they are in the checkpoint
    files: list[str] = []  # names of the checkpoint's open files, which travel with the frame; none: `path` is opened
    fds: list[int] = []  # at the receiver, which owns them: the files, in the order of `files`
    others: list[str] = []  # names of further files beside them, which explain a refusal


class Unload(msgspec.Struct, tag="unload"):
    """`keep_pages`: the model only goes to sleep. Its sessions, which are idle, are closed in the engine, and it is
    answered when their pages are on the host, as far as that has room, for the next Load of the model to find; else the
    server has closed them before."""

    request: int
    model: str
    keep_pages: bool = False


class Plan(msgspec.Struct, tag="plan"):
    """What a Load with these fields would come to, in a budget of `memory_bytes`. Answered by Planned or Failed."""

    request: int
    model: str
    path: str
    dtype: str = "auto"
    kv_bytes: int = 0  # 0: the engine decides
    max_context: int = 0  # 0: the model's own
    placing: Placing = Placing()
    memory_bytes: int = 0  # 0: the engine's budget
    shared: Dtype | None = None  # as in Load
    files: list[str] = []  # likewise
    fds: list[int] = []  # likewise
    others: list[str] = []  # likewise


class DescribeImage(msgspec.Struct, tag="describe_image"):
    """How the weights of a model are to lie that a Load with these fields finds complete. Answered by ImageDescribed or
    Failed."""

    request: int
    model: str
    path: str
    dtype: str
    placing: Placing
    shared: Dtype
    files: list[str] = []  # as in Load
    fds: list[int] = []  # likewise
    others: list[str] = []  # likewise


class PublicPrefix(msgspec.Struct, tag="public_prefix"):
    """One-way, of a model that is loaded: sessions of all tenants that begin with these tokens share the full pages of
    them from now on."""

    model: str
    tokens: list[int]


# --- engine to server -----------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag="loading"):
    """One-way: progress of a Load."""

    model: str
    stage: str
    done: int = 0
    total: int = 0


class Loaded(msgspec.Struct, tag="loaded"):
    request: int
    model: ModelInfo


class Unloaded(msgspec.Struct, tag="unloaded"):
    request: int


class Planned(msgspec.Struct, tag="planned"):
    request: int
    plan: ModelPlan


class ImageDescribed(msgspec.Struct, tag="image_described"):
    request: int
    image: Image
