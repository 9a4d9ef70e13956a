"""Mamba 1: transformers' scan of several tokens begins with zeros, and drops the state before them. Here it begins with
the state of the running call.

The scan is that of Mamba (Gu and Dao, 2023, equation 2): h = exp(Δ A) h + Δ B x; y = C h + D x.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 32  # tokens; the scan holds the factors of so many at a time

_before: ContextVar[Tensor | None] = ContextVar("state_before_the_call", default=None)


@contextmanager
def starting_from(state: Tensor | None) -> Iterator[None]:
    """Within it, scans begin with `state` [1, width, states]. None: they are transformers' own."""
    token = _before.set(state)
    try:
        yield
    finally:
        _before.reset(token)


def install(family: str) -> None:
    """Replaces the scan of transformers' module of `family`."""
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = modeling.mamba_selective_scan
    if not isinstance(own, _Scan):
        modeling.mamba_selective_scan = _Scan(own)


class _Scan:
    """The scan with the arguments of transformers' function `own`, which is called if there is no earlier state."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any) -> Any:
        """hidden_states, dt: [1, width, tokens]; A: [width, states]; B, C: [1, states, tokens]."""
        state = _before.get()
        if state is None:
            return self._own(hidden_states, dt, A, B, C, **given)
        if given["delta_bias"] is not None:
            dt = dt + given["delta_bias"].to(dt.dtype)[..., None]
        if given["delta_softplus"]:
            dt = functional.softplus(dt)
        y, state = scan(hidden_states, dt, A, B, C, state.float())
        y = y + hidden_states * given["D"][None, :, None]
        y = y * functional.silu(given["z"])
        return (y, state) if given["return_last_state"] else y


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """x, dt: [rows, width, tokens]; a: [width, states]; b, c: [rows, states, tokens]; state: float32 [rows, width,
    states] → y in the dtype of x, [rows, width, tokens], and the state after the last token."""
    made = []
    for piece in range(0, x.shape[2], PIECE):
        at = slice(piece, piece + PIECE)
        factors = torch.exp(a[None, :, None] * dt[:, :, at, None])  # [rows, width, tokens, states]
        added = dt[:, :, at, None] * b[:, :, at].transpose(1, 2)[:, None].float() * x[:, :, at, None].float()
        states = _after_each(state, factors, added)
        state = states[-1]
        made.append(torch.einsum("rwtn,rnt->rwt", torch.stack(states, 2).to(x.dtype), c[:, :, at]))
    return torch.cat(made, 2), state


def _after_each(state: Tensor, factors: Tensor, added: Tensor) -> list[Tensor]:
    """state: [rows, width, states]; factors, added: [rows, width, tokens, states] → the state after each token."""
    if added.is_meta:  # nothing is computed there, and two operations for each token would still take long
        return list(torch.empty_like(added).unbind(2))
    states = []
    for factor, more in zip(factors.unbind(2), added.unbind(2), strict=True):
        state = factor * state + more
        states.append(state)
    return states
