"""Step calls: the functions of a family that a module calls for a single token of each session, one for each state.

transformers has a function for each kind of state, which a kernel may replace. They are found by a run of the module on
the meta device with a SlotState in the place of each state. A module that does anything else with a state has no step
calls, and its states are gathered and written back (module.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.model.states.carrier import Carrier, SlotState, StateSpec

ROWS = 4  # of the run

# Names in the families' files, of transformers 5.17 to 5.24. A delta rule returns its state behind its result; the
# others change the state that they are given.
DELTA_RULES = ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention")
SELECTIVE = ("mamba2_selective_state_update", "mamba_selective_state_update")
CONVOLUTION = "causal_conv1d_update"
NAMES = (*DELTA_RULES, *SELECTIVE, CONVOLUTION)


@dataclass(frozen=True, slots=True)
class StepCall:
    """One call, as it was made on the meta device."""

    function: str
    arguments: dict[str, Any]  # by the names of the family's function; one is a SlotState


def names_of(module: nn.Module) -> dict[str, Any]:
    """The global names of the family's file, in which the module's forward looks up the functions that it calls."""
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the family's `function` by name, with its defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    bound.arguments.update(bound.arguments.pop("kwargs", {}))
    return dict(bound.arguments)


def learn_calls(
    module: nn.Module, cache: str, specs: Sequence[StateSpec], hidden: Tensor, given: dict[str, Any]
) -> tuple[StepCall, ...]:
    """The calls of a module with the states `specs`; none if it does anything else with a state.

    cache: the name of its forward's argument for the cache; hidden, given: its other arguments, on the meta device.
    """
    slots = torch.empty(ROWS, 2, dtype=torch.int32, device="meta")
    states = [SlotState(torch.empty(1, *spec.shape, dtype=spec.dtype, device="meta"), slots) for spec in specs]
    calls: list[StepCall] = []
    x = hidden.new_empty(ROWS, 1, hidden.shape[-1])
    try:
        with _recording(names_of(module), calls):
            module(x, **{**given, cache: Carrier.with_states(specs, states)})
    except Exception:  # a family's forward may do anything with a state, which is then none of these classes
        return ()
    used = [value for call in calls for value in call.arguments.values() if isinstance(value, SlotState)]
    return tuple(calls) if sorted(map(id, used)) == sorted(map(id, states)) else ()


@contextmanager
def _recording(names: dict[str, Any], calls: list[StepCall]) -> Iterator[None]:
    own = {name: names[name] for name in NAMES if name in names}
    names.update({name: _Recorder(name, getattr(value, "own", value), calls) for name, value in own.items()})
    try:
        yield
    finally:
        names.update(own)


class _Recorder:
    """Notes a call, and answers it with the family's function and states of no value."""

    def __init__(self, name: str, own: Callable[..., Any], calls: list[StepCall]) -> None:
        self._name, self._own, self._calls = name, own, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(self._own, args, kwargs)
        self._calls.append(StepCall(self._name, arguments))
        (state,) = [value for value in arguments.values() if isinstance(value, SlotState)]
        result = self._own(**{k: v.gathered() if v is state else v for k, v in arguments.items()})
        return (result[0], state) if self._name in DELTA_RULES else result
