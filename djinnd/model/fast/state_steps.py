"""StepFunction: a kernel in the place of a family's function for single tokens, if the states stay in their slots.

A module with a state calls such functions by name in the family's own file, so they are replaced there, in this process
only. A call with a SlotState goes to the kernel, and any other call to the family's function. A module is given slots
only if each of its calls (step_calls.py) agreed with the family's function on random input. The family's function then
gets the same values in float32, as the kernels compute in float32 for all dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from djinnd.model.kernels.launching.launches import UNAVAILABLE
from djinnd.model.kernels.states.delta_rule import delta_step
from djinnd.model.kernels.states.selective import selective_step
from djinnd.model.kernels.states.short_convolution import ACTIVATIONS, convolve
from djinnd.model.states.carrier import SlotState
from djinnd.model.states.layout import Stateful
from djinnd.model.states.step_calls import CONVOLUTION, DELTA_RULES, SELECTIVE, StepCall, arguments_of, names_of

log = logging.getLogger("djinnd.engine")

# Pages of a trial: the rows read zeros, their own page, and twice the same page, and all write to pages of their own.
SLOTS = ((-1, 1), (2, 2), (3, 4), (3, 5))
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # beside the largest value


class StepFunction:
    """The function `name` of a family. `own`: the family's."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self.own = own
        self._kernel = KERNELS[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, SlotState) for value in (*args, *kwargs.values())):
            return self._kernel(arguments_of(self.own, args, kwargs))
        return self.own(*args, **kwargs)


class _NotServed(Exception):
    """An argument has a value that the kernel does not know."""


def _convolution(given: dict[str, Any]) -> Tensor:
    state: SlotState = given["conv_state"]
    if given["activation"] not in ACTIVATIONS or given["hidden_states"].shape[2] != 1:
        raise _NotServed
    weight, bias = given["weight"], given["bias"]
    return convolve(given["hidden_states"], state.states, state.slots, weight, bias, given["activation"])


def _delta_rule(given: dict[str, Any]) -> tuple[Tensor, SlotState]:
    state: SlotState = given["initial_state"]
    q, k, v, decay, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    return delta_step(q, k, v, decay, beta, state.states, state.slots, given["use_qk_l2norm_in_kernel"]), state


def _selective(given: dict[str, Any]) -> Tensor:
    state: SlotState = given["state"]
    values = (given[name] for name in ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"))
    return selective_step(state.states, state.slots, *values)


KERNELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    CONVOLUTION: _convolution,
    **dict.fromkeys(DELTA_RULES, _delta_rule),
    **dict.fromkeys(SELECTIVE, _selective),
}


@torch.inference_mode()
def replace_steps(blocks: Sequence[nn.Module], stateful: Sequence[Stateful], device: torch.device) -> list[Stateful]:
    """Replaces the functions of modules that keep a state. → `stateful`, with `in_place` set where kernels serve the
    module."""
    tried: dict[tuple[type, int], bool] = {}  # by the module's class and the calls, which modules of one kind share
    made = []
    for told in stateful:
        module = blocks[told.block].get_submodule(told.path)
        kind = type(module), id(told.calls)
        if kind not in tried:
            names = names_of(module)
            agreeing = [_replace(names, call, device) for call in told.calls]  # tries all, to list all their kernels
            tried[kind] = bool(agreeing) and all(agreeing)
        made.append(replace(told, in_place=tried[kind]))
    return made


def _replace(names: dict[str, Any], call: StepCall, device: torch.device) -> bool:
    own = names[call.function]
    function = own if isinstance(own, StepFunction) else StepFunction(call.function, own)
    if agrees(function, call, device):
        names[call.function] = function
        return True
    return False


def agrees(function: StepFunction, call: StepCall, device: torch.device) -> bool:
    """Returns True if the kernel gives the same as the family's function for random input of the call's layout."""
    generator = torch.Generator(device).manual_seed(0)
    given: dict[str, Any] = {name: _random(name, value, device, generator) for name, value in call.arguments.items()}
    (at,) = [name for name, value in given.items() if isinstance(value, SlotState)]
    state: SlotState = given[at]
    earlier = state.gathered().float()
    pool = state.states.float()
    in_float32 = {
        name: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in given.items()
    }
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            wanted = function.own(**{**in_float32, at: earlier})
        got = function(**given)
    except (*UNAVAILABLE, _NotServed, AssertionError) as error:
        log.info("state_kernel_not_used function=%s error=%r", call.function, error)
        return False
    if isinstance(wanted, tuple):
        (wanted, earlier), got = wanted, got[0]
    pool[state.slots[:, 1].long()] = earlier.float()
    if got.dtype == given[_FIRST[call.function]].dtype and _close(got, wanted) and _close(state.states, pool):
        return True
    log.warning("state_kernel_disagrees function=%s", call.function)
    return False


_FIRST = {
    CONVOLUTION: "hidden_states",
    **dict.fromkeys(DELTA_RULES, "query"),
    **dict.fromkeys(SELECTIVE, "hidden_states"),
}


def _close(got: Tensor, wanted: Tensor) -> bool:
    tolerance = _TOLERANCE[got.dtype]
    return got.shape == wanted.shape and torch.allclose(
        got.float(), wanted.float(), rtol=tolerance, atol=tolerance * float(wanted.abs().max())
    )


def _random(name: str, value: object, device: torch.device, generator: torch.Generator) -> object:
    """A value of the same type and layout on the device. Decays are negative, and rates are between 0 and 1."""
    if isinstance(value, SlotState):
        pages = max(max(pair) for pair in SLOTS) + 1
        shape = pages, *value.states.shape[1:]
        states = torch.randn(shape, generator=generator, device=device).to(value.states.dtype)
        return SlotState(states, torch.tensor(SLOTS, dtype=torch.int32, device=device))
    if not isinstance(value, Tensor):
        return value
    assert value.is_floating_point()
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.randn(value.storage_offset() + last + 1, generator=generator, device=device)
    if name in ("g", "A"):
        memory = -functional.softplus(memory)
    elif name == "beta":
        memory = memory.sigmoid()
    return memory.to(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
