"""ChunkFunction: kernels in the place of a family's function for several tokens of one session.

A family's function of torch launches some dozens of kernels for each chunk of 64 tokens or more. The function is
replaced in the family's file, as those for single tokens are (state_steps.py). A trial on random input decides which
calls the kernels serve: by device, widths and dtypes. All others go to the family's function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from djinnd.model.kernels.launching.launches import UNAVAILABLE
from djinnd.model.kernels.states.chunks import CHUNK, Rule, run_chunks
from djinnd.model.states.layout import Stateful
from djinnd.model.states.step_calls import StepCall, arguments_of, names_of

log = logging.getLogger("djinnd.engine")

DELTA_RULE, CHANNEL_RULE, SCAN = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"
OF_STEP = {  # by the step's name
    "torch_recurrent_gated_delta_rule": DELTA_RULE,
    "recurrent_kimi_delta_attention": CHANNEL_RULE,
    "mamba2_selective_state_update": SCAN,
}
TOKENS = 2 * CHUNK + 17  # of a trial: a last chunk that is not full
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}  # beside the largest value
_PRECISION = {torch.float32: "ieee", torch.float16: "tf32x3", torch.bfloat16: "tf32"}

# Which arguments decide about the kernel's variant. The others may have only values that change nothing.
_OF_RULES = ("query", "key", "value", "g", "beta")
_ARGUMENTS = {
    DELTA_RULE: _OF_RULES,
    CHANNEL_RULE: _OF_RULES,
    SCAN: ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias"),
}
_NOTHING = ("z", "cu_seqlens", "seq_idx")


class ChunkFunction:
    """The function `name` of a family. `own`: the family's."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self.own = own
        self._name = name
        self._served: set[object] = set()
        self.compute = _scan if name == SCAN else _delta_rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._served:
            given = arguments_of(self.own, args, kwargs)
            if self._kind(given) in self._served:
                return self.compute(given)
        return self.own(*args, **kwargs)

    def _kind(self, given: dict[str, Any]) -> object:
        first: Tensor = given[_ARGUMENTS[self._name][0]]
        if first.shape[0] != 1 or any(given.get(name) is not None for name in _NOTHING):
            return None
        values = (given[name] for name in _ARGUMENTS[self._name])
        layout = tuple(None if v is None else (v.dtype, v.shape[2:] if v.dim() > 2 else v.shape) for v in values)
        return first.device.type, layout, given.get("use_qk_l2norm_in_kernel"), given.get("dt_softplus")

    def try_with(self, given: dict[str, Any]) -> bool:
        """Serves calls like `given` from now on if the kernels give the same as the family's function, which gets the
        values in float32. Returns True if they do."""
        in_float32 = {k: v.float() if isinstance(v, Tensor) else v for k, v in given.items()}
        try:
            got = self.compute(given)
        except (*UNAVAILABLE, AssertionError) as error:
            log.info("chunk_kernel_not_used function=%s error=%r", self._name, error)
            return False
        wanted = self.own(**in_float32)
        tolerance = _TOLERANCE[given[_ARGUMENTS[self._name][0]].dtype]
        if all(_close(one, other, tolerance) for one, other in zip(got, wanted, strict=True)):
            self._served.add(self._kind(given))
            return True
        log.warning("chunk_kernel_disagrees function=%s", self._name)
        return False


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    bound = tolerance * float(wanted.abs().max())
    return got.shape == wanted.shape and torch.allclose(got.float(), wanted.float(), rtol=tolerance, atol=bound)


def _delta_rule(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    q, k, v, decay, rate = (given[name][0].contiguous() for name in _OF_RULES)
    state = _state(given["initial_state"], (v.shape[1], k.shape[2], v.shape[2]), q)
    rule = Rule(True, k.shape[2] ** -0.5, given["use_qk_l2norm_in_kernel"])
    out, state = run_chunks(q, k, v, decay, rate, state, rule, _PRECISION[q.dtype])
    return out.unsqueeze(0), state.unsqueeze(0) if given["output_final_state"] else None


def _scan(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    x, dt, b, c = (given[name][0].contiguous() for name in ("hidden_states", "dt", "B", "C"))
    rate = dt.float() if given["dt_bias"] is None else dt.float() + given["dt_bias"].float()
    if given["dt_softplus"]:
        rate = functional.softplus(rate)
    rate = rate.clamp(*given["dt_limit"])
    state = _state(given["initial_states"], (x.shape[1], x.shape[2], b.shape[2]), x)
    rule = Rule(False, 1.0, by_value=True)
    out, state = run_chunks(c, b, x.float(), rate * given["A"].float(), rate, state, rule, _PRECISION[x.dtype])
    if given["D"] is not None:
        out += x * given["D"][:, None]
    out = out.unsqueeze(0)
    return (out, state.unsqueeze(0)) if given["return_final_states"] else out


def _state(state: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The state before the first token, float32."""
    return like.new_zeros(shape, dtype=torch.float32) if state is None else state[0].float().contiguous()


@torch.inference_mode()
def replace_chunks(blocks: Sequence[nn.Module], stateful: Sequence[Stateful], device: torch.device) -> None:
    """Replaces the functions for several tokens of modules that keep a state."""
    tried: set[tuple[type, int]] = set()
    for told in stateful:
        module = blocks[told.block].get_submodule(told.path)
        kind = type(module), id(told.calls)
        if kind not in tried:
            tried.add(kind)
            for call in told.calls:
                replace_chunk_of(call, names_of(module), device)


@torch.inference_mode()
def replace_chunk_of(call: StepCall, names: dict[str, Any], device: torch.device) -> bool:
    """Replaces the function for several tokens that belongs to the step's function of `call`, in the `names` of the
    family's file. Returns True if kernels serve it."""
    name = OF_STEP.get(call.function, "")
    own = names.get(name)
    if own is None:
        return False
    function = own if isinstance(own, ChunkFunction) else ChunkFunction(name, own)
    given = arguments_of(function.own, (), _example(name, call, device))
    if not function.try_with(given):
        return False
    names[name] = function
    return True


def _example(name: str, call: StepCall, device: torch.device) -> dict[str, Any]:
    """Random arguments for TOKENS tokens of one session, with the widths and dtypes of the step's."""
    generator, told = torch.Generator(device).manual_seed(0), call.arguments

    def random(like: Tensor, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(like.dtype)

    if name != SCAN:
        query, value = told["query"], told["value"]
        heads = value.shape[2]
        return {
            **{each: random(told[each], 1, TOKENS, *told[each].shape[2:]) for each in ("query", "key", "value")},
            "g": -functional.softplus(random(told["g"], 1, TOKENS, *told["g"].shape[2:])),
            "beta": random(told["beta"], 1, TOKENS, heads).sigmoid(),
            "initial_state": random(query, 1, heads, query.shape[3], value.shape[3]).float(),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": told["use_qk_l2norm_in_kernel"],
        }
    x, b = told["hidden_states"], told["B"]
    return {
        "hidden_states": random(x, 1, TOKENS, *x.shape[1:]),
        "dt": random(told["dt"], 1, TOKENS, x.shape[1]),
        "A": -functional.softplus(random(told["A"], x.shape[1])),
        **{each: random(told[each], 1, TOKENS, *b.shape[1:]) for each in ("B", "C")},
        **{each: None if told[each] is None else random(told[each], x.shape[1]) for each in ("D", "dt_bias")},
        "chunk_size": CHUNK,
        "dt_softplus": told["dt_softplus"],
        "initial_states": random(x, 1, *x.shape[1:], b.shape[2]).float(),
        "return_final_states": True,
    }
