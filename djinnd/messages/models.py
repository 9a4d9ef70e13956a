"""Messages about models: plan one, describe the layout of its image, load it, unload it."""

from __future__ import annotations

from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.image import Dtype, Image
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from djinnd.messages.directions import Answer, CallAnswer, EngineCall, FromEngine, ToEngine

# --- server to engine -----------------------------------------------------------------------------------------------


class CheckpointCall(EngineCall[Answer]):
    """The common fields of calls about a checkpoint."""

    model: str
    path: str
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    placing: Placing = Placing()
    shared: Dtype | None = None  # dtype of the weights that a client shares; None: the weights are in the checkpoint
    files: list[str] = []  # names of the checkpoint's open files, which travel with the frame; none: `path` is opened
    fds: list[int] = []  # descriptors of `files`, in their order; the receiver owns them
    others: list[str] = []  # names of further files in the checkpoint's folder, which help to explain a refusal


class Load(CheckpointCall["Loaded"], tag="load"):
    kv_bytes: int = 0  # 0: the engine decides
    host_kv_bytes: int | None = None  # bytes of pages in host memory; None: the engine decides
    disk_kv_bytes: int | None = None  # bytes of pages in files; None: the engine decides
    disk_folder: str = ""  # for those files; "": no disk tier
    max_context: int = 0  # 0: the model's own
    is_draft: bool = False  # it guesses for other models: if the engine decides, it gets few pages


class Unload(EngineCall["Unloaded"], tag="unload"):
    """Answered by Unloaded. Unless `keep_pages`, the server has closed the model's sessions before.

    `keep_pages`: the model goes to sleep. The engine closes its sessions, which are idle, and writes their pages to the
    host, as far as there is room, before it answers. The next Load of the model finds them.
    """

    model: str
    keep_pages: bool = False


class Plan(CheckpointCall["Planned"], tag="plan"):
    """Asks for the placement that a Load with these fields would get: in a budget of `memory_bytes` without other
    models, or now, beside those that are loaded. Answered by Planned or Failed."""

    kv_bytes: int = 0  # 0: the engine decides
    max_context: int = 0  # 0: the model's own
    memory_bytes: int = 0  # 0: now, in the engine's budget
    held_bytes: int = 0  # of device memory that the model has itself and gives back first; the engine sets it


class DescribeImage(CheckpointCall["ImageDescribed"], tag="describe_image"):
    """Asks for the layout that an image must have so that a Load with these fields finds it complete. Its weights are
    shared. Answered by ImageDescribed or Failed."""


class PublicPrefix(ToEngine, tag="public_prefix"):
    """One-way: from now on, sessions of all tenants that begin with these tokens share the full pages of them. The
    model is loaded."""

    model: str
    tokens: list[int]


# --- engine to server -----------------------------------------------------------------------------------------------


class Loading(FromEngine, tag="loading"):
    """One-way: progress of a Load."""

    model: str
    stage: str
    done: int = 0
    total: int = 0


class Loaded(CallAnswer, tag="loaded"):
    model: ModelInfo


class Unloaded(CallAnswer, tag="unloaded"):
    """The model is gone."""


class Planned(CallAnswer, tag="planned"):
    plan: ModelPlan


class ImageDescribed(CallAnswer, tag="image_described"):
    image: Image
