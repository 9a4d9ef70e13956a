"""Sessions that are edited in many ways, and the same in PyTorch; for models of the reduced checkpoints' shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import djinn_client as djinn
from tests.support import ops
from tests.support.daemon import Daemon
from tests.support.models import reduced_model
from tests.support.torch_hooks import Change

NEW = 12  # tokens that a call generates
BLOCKS, WIDTH, VOCABULARY = 4, 64, 512


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def go_on(session: djinn.Session, prompt: list[int] | None = None, count: int = NEW) -> list[int]:
    return session.generate(prompt, max_tokens=count, ignore_eos=True).token_ids


def vector(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape or (WIDTH,), generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, what: str, rounding: Callable[[], float] = lambda: 0.0) -> None:
    """To 1e-4. Where numbers are far larger than elsewhere (a Gemma of random weights has hundreds), to 5e-5 of the
    largest: transformers' own float32 is 2e-5 of it from its float64. `rounding`: how far that is here, which differs
    from processor to processor; asked for, and added, only where 1e-4 does not do."""
    largest = float(expected.abs().max())
    near = 1e-4 if largest < 30 else 5e-5 * largest
    if float((found - expected).abs().max()) > near:
        near += rounding()
    torch.testing.assert_close(found, expected, rtol=0, atol=near, msg=lambda told: f"{what}: {told}")


@contextmanager
def loaded(daemon: Daemon, name: str) -> Iterator[Path]:
    """The folder of the family's reduced model, while the daemon has it."""
    folder = reduced_model(name)
    with daemon.client() as client:
        client.load(str(folder))
        yield folder
        assert client.status(check=True).integrity == []
        client.unload(str(folder))


@dataclass(frozen=True)
class Case:
    """What a session has done to it, and the same in PyTorch."""

    edits: list[dict[str, Any]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def cases() -> dict[str, Case]:
    v, w, rows, bias = vector(1), vector(2), vector(3, 3, WIDTH), vector(4, VOCABULARY)
    where, attention, mlp = "blocks.1.hook_resid_post", "blocks.2.hook_attn_out", "blocks.0.hook_mlp_out"
    every_mlp = [f"blocks.{block}.hook_mlp_out" for block in range(BLOCKS)]
    at = [0, 4, 5]
    simple = {
        "add": ({"point": "blocks.1", "vector": v, "scale": 2.0}, where, ops.add(v, 2.0)),
        "scale": ({"point": attention, "op": "scale", "scale": 0.25}, attention, ops.scale(0.25)),
        "project out": ({"point": where, "vector": v, "op": "project_out"}, where, ops.project_out(v)),
        "half of it": (
            {"point": where, "vector": 7 * v, "op": "project_out", "scale": 0.5},
            where,
            ops.project_out(v, 0.5),
        ),
        "replace": ({"point": mlp, "vector": w, "op": "replace"}, mlp, ops.replace(w)),
        "clamp": (
            {"point": where, "vector": w, "op": "clamp", "low": -1.0, "high": 0.5},
            where,
            ops.clamp(w, -1, 0.5),
        ),
        "clamp below": ({"point": mlp, "vector": w, "op": "clamp", "low": 1.0}, mlp, ops.clamp(w, 1.0, None)),
        "embedding": ({"point": "hook_embed", "vector": v, "scale": 0.5}, "hook_embed", ops.add(v, 0.5)),
        "norm": (
            {"point": "ln_final.hook_normalized", "vector": v},
            "ln_final.hook_normalized",
            ops.add(v),
        ),
        "logits": ({"point": "logits", "vector": bias}, "logits", ops.add(bias)),
    }
    found = {name: Case([edit], [Change(point, act)]) for name, (edit, point, act) in simple.items()}
    found["positions"] = Case(
        [{"point": where, "vector": rows, "op": "replace", "positions": at}],
        [Change(where, ops.replace(rows), positions=at)],
    )
    found["many"] = Case(
        [
            {"point": "blocks.*.hook_mlp_out", "op": "scale", "scale": 0.5},
            {"point": where, "vector": v, "op": "project_out"},
            {"point": where, "vector": w},  # after that, in this order
            {"point": where, "vector": w, "op": "add", "scale": -3.0, "positions": at},
            {"point": ["blocks.0", "blocks.2"], "vector": v, "scale": 0.1},
        ],
        [
            *(Change(point, ops.scale(0.5)) for point in every_mlp),
            Change(where, ops.project_out(v)),
            Change(where, ops.add(w)),
            Change(where, ops.add(w, -3.0), positions=at),
            *(Change(f"blocks.{block}.hook_resid_post", ops.add(v, 0.1)) for block in (0, 2)),
        ],
    )
    return found
