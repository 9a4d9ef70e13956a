"""The buffers of a model's store: their parameters, and how each is filled from the checkpoint, plain or in a code."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from djinn_client.protocol.fields.placing import Quantise
from djinnd.device import Device
from djinnd.model.family.heads import Head
from djinnd.model.family.recipes.gguf import GgufRecipes
from djinnd.model.family.recipes.stored import RecipeBook
from djinnd.model.family.skeleton import Skeleton
from djinnd.model.placing.projections import quantisable
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.forms.coded_form import Code, Coded
from djinnd.weights.forms.quantise import CODINGS, quantising
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.layout import Layout
from djinnd.weights.store import Buffer

Recipes = RecipeBook | GgufRecipes


def recipes_of(model: PreTrainedModel, checkpoint: CheckpointFiles, head: Head | None = None) -> Recipes:
    """The recipes of the model's parameters, by the kind of the checkpoint. `head`: the model is this head of it."""
    if head is not None:
        return RecipeBook(model, checkpoint, head.name_of)
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufRecipes(model.config, checkpoint)
    return RecipeBook(model, checkpoint)


def buffers_of(skeleton: Skeleton, recipes: Recipes | None, device: Device, quantise: Quantise) -> list[Buffer]:
    """recipes: None if a client fills the store. quantise: of parameters that the checkpoint has without a code."""
    buffers = []
    for prefix, layout, routing in skeleton.layouts():
        coded: dict[str, Coded] = {}
        suffice = False
        # The rest has no prefix. It is decoded when it is loaded, because modules read its parameters in many ways.
        if recipes is not None and prefix:
            block = skeleton.adapter.blocks[skeleton.prefixes.index(prefix)]
            names = quantisable(block, layout) if quantise else []
            coded = _coded(prefix, layout, recipes, device, dict.fromkeys(names, quantise))
            suffice = routing is not None and _codes_suffice(block, layout, coded, device)
        filled = {}
        if recipes is not None:
            filled = {name: recipes.recipe(prefix + name) for name in layout.entries if name not in coded}
        buffers.append(Buffer(prefix, layout, filled, routing, coded, suffice))
    return buffers


def _coded(
    prefix: str, layout: Layout, recipes: Recipes, device: Device, quantised: dict[str, Quantise]
) -> dict[str, Coded]:
    """The parameters of a buffer that are kept in a code: the checkpoint's, or one to which they are quantised."""
    coded = {}
    for name in (name for unit in layout.units for name in unit):
        shape = layout.entries[name].shape
        found = recipes.coded(prefix + name, shape)
        if found is None and name in quantised:
            coding = CODINGS[quantised[name]]
            found = Coded(Code(coding), quantising(coding, recipes.recipe(prefix + name), shape, torch.float32))
        if found is not None and _decodes(device, found.code, shape):
            coded[name] = found
    return coded


def _codes_suffice(block: nn.Module, layout: Layout, coded: dict[str, Coded], device: Device) -> bool:
    """Returns True if the device computes the block's experts from their codes alone. On a CPU it does not."""
    if device.torch_device.type == "cpu":
        return False
    from djinnd.model.fast.experts import codes_suffice  # Triton comes with CUDA builds of torch

    module = block.get_submodule(next(iter(layout.entries)).rpartition(".")[0])
    return codes_suffice(module, layout, {name: each.code for name, each in coded.items()})


def _decodes(device: Device, code: Code, shape: tuple[int, ...]) -> bool:
    """Returns True if the device can decode the code before each step."""
    if device.torch_device.type == "cpu":
        return True
    from djinnd.model.kernels.coded.decode import decodes  # Triton comes with CUDA builds of torch

    return decodes(code.coding, *code.stack_shape(shape)[1:])
