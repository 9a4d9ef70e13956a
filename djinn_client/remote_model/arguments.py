"""The arguments of transformers' `generate` in three groups, as docs/guide/remote-model.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djinn_client.errors import InvalidRequest

HONOURED = frozenset(
    {
        *("inputs", "input_ids", "attention_mask", "generation_config", "stopping_criteria", "streamer", "tokenizer"),
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "return_dict_in_generate", "output_logits"),
    }
)

# Arguments that choose how transformers computes, and never which tokens come out, and arguments that belong to a
# method of generation that is refused. Any value does.
WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "logits_to_keep", "synced_gpus"),
        *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config", "low_memory"),
        *("early_stopping", "length_penalty", "diversity_penalty", "renormalize_logits"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
        *("decoder_start_token_id", "transformers_version"),
    }
)

_OWN_LOOP = "choose the tokens in a loop of your own, from `remote(input_ids).logits`"
_BIAS = "`djinn.Session.generate(logit_bias=…)` adds numbers to the logits of tokens"
_SAMPLING = "sample with temperature, top_k, top_p and min_p"
_LEAVE_OUT = "leave it out: the daemon decodes without a second model"

# Argument → the values that switch it off, beside None, and the remedy for all others.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "sample several outputs with do_sample=True and num_return_sequences"),
    "num_beam_groups": ((1,), "sample several outputs with do_sample=True and num_return_sequences"),
    "constraints": ((), "`djinn.Session.generate(grammar=…)` makes the output follow a grammar"),
    "force_words_ids": ((), "`djinn.Session.generate(grammar=…)` makes the output follow a grammar"),
    "prefix_allowed_tokens_fn": ((), "`djinn.Session.generate(grammar=…)` makes the output follow a grammar"),
    "typical_p": ((1.0,), _SAMPLING),
    "top_h": ((), _SAMPLING),
    "epsilon_cutoff": ((0.0,), _SAMPLING),
    "eta_cutoff": ((0.0,), _SAMPLING),
    "penalty_alpha": ((0.0,), _SAMPLING),
    "dola_layers": ((), _SAMPLING),
    "encoder_repetition_penalty": ((1.0,), "repetition_penalty counts the tokens of prompt and output"),
    "no_repeat_ngram_size": ((0,), "repetition_penalty makes repetitions less likely"),
    "encoder_no_repeat_ngram_size": ((0,), "repetition_penalty makes repetitions less likely"),
    "exponential_decay_length_penalty": ((), "max_new_tokens bounds the output"),
    "bad_words_ids": ((), _BIAS),
    "suppress_tokens": (([],), _BIAS),
    "begin_suppress_tokens": (([],), _BIAS),
    "sequence_bias": ((), _BIAS),
    "forced_bos_token_id": ((), "put the token at the end of the prompt"),
    "forced_eos_token_id": ((), "append the token to the output"),
    "remove_invalid_values": ((False,), "leave it out: logits that are not finite are an error"),
    "token_healing": ((False,), "cut the last token off the prompt"),
    "guidance_scale": ((1.0,), _OWN_LOOP),
    "negative_prompt_ids": ((), _OWN_LOOP),
    "negative_prompt_attention_mask": ((), _OWN_LOOP),
    "logits_processor": (([],), _OWN_LOOP),
    "watermarking_config": ((), _OWN_LOOP),
    "custom_generate": ((), _OWN_LOOP),
    "trust_remote_code": ((False,), _OWN_LOOP),
    "output_scores": ((False,), "output_logits gives the logits before penalties and sampling limits"),
    "output_attentions": ((False,), "run the model in your own process: no point has attention patterns"),
    "output_hidden_states": ((False,), "`djinn.Session.capture` reads the activations at any point"),
    "assistant_model": ((), _LEAVE_OUT),
    "assistant_tokenizer": ((), _LEAVE_OUT),
    "assistant_early_exit": ((), _LEAVE_OUT),
    "prompt_lookup_num_tokens": ((), _LEAVE_OUT),
    "use_mtp": ((False,), _LEAVE_OUT),
    "speculation_type": ((), _LEAVE_OUT),
    "past_key_values": ((), "`djinn.Session` keeps the KV from one call to the next"),
    "cache": ((), "`djinn.Session` keeps the KV from one call to the next"),
    "inputs_embeds": ((), "give input_ids; `djinn.Session.patch` replaces activations"),
    "position_ids": ((), "leave it out: positions count the tokens that attention_mask keeps"),
    "token_type_ids": ((), "leave it out: the tokenizer's return_token_type_ids=False does"),
}


_REFUSED_BY_CALL = {**REFUSED, "use_cache": ((False,), "`djinn.Session` keeps the KV from one call to the next")}


def check_generate(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an argument of `generate` that is not honoured, and has an effect in transformers."""
    others = {name: value for name, value in arguments.items() if name not in HONOURED and name not in WITHOUT_EFFECT}
    _refuse(others, REFUSED)


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an argument of `remote(…)` that is not honoured."""
    _refuse(arguments, _REFUSED_BY_CALL)


def _refuse(arguments: Mapping[str, Any], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, value in arguments.items():
        off, remedy = refused.get(name, ((), "leave it out: it is not known here"))
        if value is not None and not _is_one_of(value, off):
            told = repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
            raise InvalidRequest(f"a remote model does not take {name} ({told} here): {remedy}", field=name)


def _is_one_of(value: Any, off: tuple[Any, ...]) -> bool:
    """Compares types first, since the comparison of a tensor has no truth value."""
    return any(isinstance(value, int | float | list) and value == each for each in off)
