"""Skeleton: the family's own modules on the meta device, and the names, shapes and layouts learnt from them.

A parameter has no memory until `bind` gives it a view of its block's buffer.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from djinn_client.errors import ModelRejected
from djinnd.model.attention import hf_attention
from djinnd.model.families import ADAPTED, PATCHED, indexers
from djinnd.model.family.adapter import Adapter, find_blocks
from djinnd.model.family.configuration.counts import check_counts
from djinnd.model.family.configuration.derived import derived_bytes
from djinnd.model.family.configuration.rope import end_context, fix_frequencies, keeping_the_first_set
from djinnd.model.family.configuration.switches import set_switches
from djinnd.model.family.experts import find_stack
from djinnd.model.family.heads import input_of
from djinnd.model.family.learning.block_runs import learn_blocks
from djinnd.model.family.learning.point_map import learn_points
from djinnd.model.family.wrapper import language_model, make_model, text_config
from djinnd.weights.layout import Layout
from djinnd.weights.store import Routing


def make_config(told: Mapping[str, Any]) -> PreTrainedConfig:
    """Makes the transformers configuration from the contents of config.json. A multimodal model's contains that of its
    language model: see `text_config`.

    Does what AutoConfig does; AutoConfig itself would open files. Code in a checkpoint is never run.

    Raises ModelRejected for a configuration that transformers does not know or that djinnd cannot serve.
    """
    values: dict[str, Any] = PreTrainedConfig._decode_special_floats(deepcopy(dict(told)))  # such as infinity
    check_counts(values)
    if values.get("model_type") == "mistral" and "layer_types" in values:
        values["model_type"] = "ministral"
    family = values.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} has no model of this kind"
        raise ModelRejected(f"config.json: model_type is {str(family)[:80]!r}; {known}", family=str(family)[:80])
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[family].from_dict(values)
    except Exception as error:  # transformers raises exceptions of many types for a faulty configuration
        raise ModelRejected(f"config.json: {error}", family=family) from error
    text = text_config(config)
    fix_frequencies(text)
    if (longest := indexers.longest(text)) is not None:
        end_context(text, longest)
    for each in (config, text):
        set_switches(each, is_wrapper=text is not config)
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        is_dict = isinstance(quantised, dict)
        method = quantised.get("quant_method") if is_dict else getattr(quantised, "quant_method", None)
        raise ModelRejected(
            f"config.json says that the weights are quantised ({str(method)[:80]}), which is not supported for weights "
            "that a client shares: load the checkpoint's folder, or share a model with plain weights",
            family=config.model_type,
        )
    return config


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The family's model on the meta device, with djinnd's attention. Raises ModelRejected with the family's
    name."""
    hf_attention.install()
    family = text_config(config).model_type
    PATCHED.get(family, lambda: None)()
    try:
        with torch.device("meta"):
            model = make_model(config, dtype, hf_attention.NAME)
    except Exception as error:  # families raise KeyError, ValueError, ImportError …
        if error.args == (hf_attention.NAME,):  # the family looks attention up in a table of its own
            why = "does not use transformers' attention interface, so djinnd cannot page its KV"
        else:
            why = f"cannot be built: {error!r}"
        raise ModelRejected(f"{config.model_type} {why}", family=config.model_type) from error
    model.eval()
    if family in ADAPTED:
        ADAPTED[family](find_blocks(model))
    return model


class Skeleton:
    """A model that `build` made, without weights. Takes the blocks out of the model (see Adapter), and has the layout
    of every buffer, the KV shape, the points and the expert stacks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = text_config(model.config)
        self.family: str = self.config.model_type
        self.derived_bytes = derived_bytes(model)
        self.shapes = _parameter_shapes(model)  # by full name
        self.prefixes = _block_prefixes(model)
        self.tied = _tied(model)
        self.unused = _unused(model)
        tied = [name for first, others in self.tied.items() for name in (first, *others)]
        if any(name.startswith(tuple(self.prefixes)) for name in tied):
            raise ModelRejected(
                f"{self.family} ties parameters of its blocks, which is not supported yet", family=self.family
            )
        self.adapter = Adapter(model, language_model(model))
        self.head_input = input_of(model)  # None: the model is no head
        if self.head_input is not None:
            self.head_input.adapter = weakref.proxy(self.adapter)
        layers = self.prefixes[0].removesuffix(".0.")
        with keeping_the_first_set(model):
            learnt, self.stateful = learn_blocks(self.adapter, self.config)
            self.points = learn_points(self.adapter, layers, int(self.config.vocab_size))
        self.attentions, self.kv = learnt.attentions, tuple(learnt.shapes)
        self.stacks = [find_stack(block, self.config.hidden_size) for block in self.adapter.blocks]

    @property
    def num_blocks(self) -> int:
        return len(self.adapter.blocks)

    def layouts(self) -> Iterator[tuple[str, Layout, Routing | None]]:
        """The buffers of the weights in order: prefix of the parameters' names, layout, and for experts their routing.

        One buffer for each block, then one for each block's stacked experts, then one for the rest. A block's buffer
        has no stacked experts, because they are fetched on demand.
        """
        experts = {prefix: stack for prefix, stack in zip(self.prefixes, self.stacks, strict=True) if stack is not None}
        apart = {prefix + name for prefix, stack in experts.items() for name in stack.names}
        for prefix in self.prefixes:
            own = (name for name in self.shapes if name.startswith(prefix) and name not in apart)
            yield prefix, self._layout(prefix, own), None
        for prefix, stack in experts.items():
            yield prefix, self._layout(prefix, (prefix + name for name in stack.names)), stack.routing
        rest = (name for name in self.shapes if not name.startswith(tuple(self.prefixes)))
        yield "", self._layout("", rest), None

    def _layout(self, prefix: str, names: Iterable[str]) -> Layout:
        return Layout((name.removeprefix(prefix), self.shapes[name]) for name in names)


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """For each parameter that has several names: the first name → the other names."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {names[0]: names[1:] for names in by_identity.values() if len(names) > 1}


def _unused(model: PreTrainedModel) -> list[str]:
    """Patterns of tensor names that a checkpoint of the family may have and that are ignored."""
    derived = [name for name, _ in model.named_buffers() if name not in model.state_dict()]
    removed = [path for path, module in model.named_modules() if isinstance(module, indexers.Removed)]
    return [
        *(f"^{re.escape(name)}$" for name in derived),
        *(rf"^{re.escape(path)}\." for path in removed),
        *(model._keys_to_ignore_on_load_unexpected or ()),
    ]


def _parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that a checkpoint must have: parameters and persistent buffers."""
    kept = set(model.state_dict().keys())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shapes |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in kept}
    return shapes


def _block_prefixes(model: nn.Module) -> list[str]:
    blocks = find_blocks(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    return [f"{prefix}.{index}." for index in range(len(blocks))]


def bind(module: nn.Module, views: dict[str, Tensor]) -> None:
    """Replaces each named parameter or persistent buffer by its view. Copies nothing."""
    for name, view in views.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(view, requires_grad=False)
        else:
            owner._buffers[leaf] = view
