"""One call of `generate`: its settings, its sessions and its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from djinn_client.arguments.options import GenerateOptions
from djinn_client.errors import InvalidRequest
from djinn_client.remote_model import settings
from djinn_client.remote_model.lengths import new_tokens
from djinn_client.remote_model.outputs import Output, logits_of_all, read_all
from djinn_client.remote_model.padding import Batch, batch_of
from djinn_client.remote_model.rows import Served, fork_each, sessions
from djinn_client.session.calls import SessionCalls


@dataclass(frozen=True)
class Generation:
    batch: Batch
    options: GenerateOptions
    criteria: StoppingCriteriaList
    copies: int  # outputs of each prompt
    pad: int | None  # behind an output that has ended; None: no token ends one
    with_logits: bool

    def run(self, served: Served, streamer: Any) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Prompts and outputs, and for each new token the logits if they are wanted."""
        prompts, whole = self.batch.rows, self.batch.ids.repeat_interleave(self.copies, dim=0)
        if streamer is not None:
            streamer.put(whole)
        with sessions(served, len(prompts)) as opened:
            if self.copies > 1:
                fork_each(opened, prompts, self.copies)
            outputs = [self._output(each, prompts[row // self.copies]) for row, each in enumerate(opened)]
            whole = read_all(outputs, whole, self.criteria, self.pad, streamer)
            logits = logits_of_all(outputs) if self.with_logits else None
        if streamer is not None:
            streamer.end()
        return whole, logits

    def _output(self, session: SessionCalls, prompt: list[int]) -> Output:
        """A session among several of one prompt has the prompt already."""
        options = self.options | {"seed": settings.drawn_seed()} if "temperature" in self.options else self.options
        return Output(session, prompt, session.stream(prompt if self.copies == 1 else None, options))


def prepared(
    config: GenerationConfig,
    inputs: Any,
    attention_mask: Any,
    *,
    stopping_criteria: Any,
    tokenizer: Any,
    context: int | None,
    is_length_given: bool,
    vocab: int,
) -> Generation:
    """`config` has all defaults. Raises InvalidRequest."""
    settings.check_config(config)
    ends, pad = settings.end_tokens(config), settings.pad_token(config)
    batch = batch_of(_beginning(config) if inputs is None else inputs, attention_mask, None if pad in ends else pad)
    length = batch.ids.shape[1]
    lengths = new_tokens(config, length, context, is_length_given)
    return Generation(
        batch=batch,
        options=settings.options_of(config, lengths, vocab),
        criteria=settings.criteria_of(config, length + lengths.most, stopping_criteria, tokenizer),
        copies=config.num_return_sequences or 1,
        pad=pad if ends else None,
        with_logits=bool(config.return_dict_in_generate and config.output_logits),
    )


def _beginning(config: GenerationConfig) -> Tensor:
    """The prompt of a call without one. Raises InvalidRequest."""
    if config.bos_token_id is None:
        raise InvalidRequest("the model has no bos_token_id to begin with: give input_ids", field="input_ids")
    return torch.tensor([[config.bos_token_id]])
