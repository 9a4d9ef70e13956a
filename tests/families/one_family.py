"""Serves one reduced model and compares it with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from djinn_client.errors import ModelRejected
from djinnd.model.family.skeleton import Skeleton, build, make_config
from djinnd.model.family.wrapper import language_model, leave_out_timm
from tests.families.configurations import CONTEXT, VOCAB, reduced, reduced_wrapper, wrapper_types
from tests.support.loaded import Served, random_prompt, small_pages

LARGEST = 5_000_000  # parameters of a reduced model
TOLERANCE = 1e-4  # error of a logit, float32, for logits of up to 1; larger logits may differ by as much more
NEAR_TIE = 2e-5  # of logits: rounding may choose between two tokens that are nearer

READERS = (1, 7, 130, 600)  # lengths of prompts; all their logits are compared
TALKERS = ((90, 24), (33, 30), (3, 12))  # (tokens of the prompt, greedy tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a model type is served."""

    served: bool
    reason: str = ""  # why it is refused, or why it was not tried


class Differs(AssertionError):
    """A served model that differs from transformers."""


def try_family(model_type: str, folder: Path) -> Outcome:
    """Serves the reduced model of a type, which is written to `folder`. Raises Differs if results are not those of
    transformers."""
    try:
        model = reference_model(model_type)
    except Exception as error:  # a family's code may raise exceptions of any type
        return _without_reference(model_type, error)
    model.save_pretrained(folder)
    try:
        with Served(folder, plan=small_pages(200, max_context=CONTEXT), max_batch_tokens=96) as served:
            served.shuffle_pages()
            _compare(served, model)
    except ModelRejected as refused:
        return Outcome(False, refused.message)
    return Outcome(True)


def reference_model(model_type: str) -> PreTrainedModel:
    """The reduced model with random weights, in float32, after a first pass over one prompt."""
    leave_out_timm()
    is_wrapper = model_type in wrapper_types()
    config = reduced_wrapper(model_type) if is_wrapper else reduced(model_type)
    of = AutoModelForMultimodalLM if is_wrapper else AutoModelForCausalLM
    with torch.device("meta"):
        parameters = sum(p.numel() for p in of.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its reduced model has over {LARGEST // 1_000_000} million parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = of.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        _disturb(model)
    language_logits(model, random_prompt(130, VOCAB, 0))
    return model


@torch.no_grad()
def _disturb(model: nn.Module) -> None:
    """Adds noise to parameters that are initialised to a constant, such as norms and biases."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and not parameter.std():
            parameter += 0.05 * torch.randn_like(parameter)


def _without_reference(model_type: str, error: Exception) -> Outcome:
    """The outcome for the type's own default configuration. A refusal needs no weights."""
    try:
        Skeleton(build(make_config(json.loads(CONFIG_MAPPING[model_type]().to_json_string())), torch.float32))
    except ModelRejected as refused:
        return Outcome(False, refused.message)
    except Exception as unusual:  # some types have no valid default configuration
        error = unusual
    told = str(error).strip().splitlines()
    return Outcome(False, f"not tried: its reduced model does not run in transformers: {told[-1] if told else error!r}")


def _compare(served: Served, model: PreTrainedModel) -> None:
    """Several sessions join and leave each other's batches. Raises Differs."""
    prompts = [random_prompt(length, VOCAB, 1) for length in READERS]
    readers = [served.open() for _ in prompts]
    talkers = [(served.open(), random_prompt(length, VOCAB, 2), count) for length, count in TALKERS]
    forwards = []
    for reader, prompt, (talker, own, count) in zip(readers, prompts, (*talkers, (None, [], 0)), strict=True):
        forwards.append(served.submit(reader, prompt))
        if talker is not None:
            served.submit(talker, own, max_tokens=count)
        for _ in range(3):
            served.step()
    served.run()
    for prompt, forward in zip(prompts, forwards, strict=True):
        wanted = language_logits(model, prompt)
        error = (served.logits_of(forward) - wanted).abs().max().item()
        if not error < TOLERANCE * max(1.0, wanted.abs().max().item()):
            raise Differs(f"the logits of a prompt of {len(prompt)} tokens differ by {error:.2g}")
    for talker, own, count in talkers:
        assert len(talker.tokens) == len(own) + count
        logits = language_logits(model, talker.tokens[:-1])[len(own) - 1 :]
        chosen = logits.gather(1, torch.tensor(talker.tokens[len(own) :])[:, None])[:, 0]
        short = (logits.max(dim=1).values - chosen).max().item()
        if short > NEAR_TIE:
            raise Differs(f"a token after a prompt of {len(own)} tokens is not the likeliest, by {short:.2g}")


@torch.inference_mode()
def language_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = language_model(model)(input_ids=torch.tensor([tokens])).logits[0]
    return logits.float()
