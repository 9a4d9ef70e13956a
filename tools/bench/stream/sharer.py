"""A client that hands a model over: random weights of a shape, made when they are asked for, so that 140 GB of them
need no 140 GB of memory.

    python -m tools.bench.stream.sharer JSON      a Sharing; ends when the model is served

A process of its own, so that only the daemon has memory of the device while it is measured. The model stays behind for
as long as the daemon waits for a client that it has lost (`limits.session_grace`).
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

import djinn_client as djinn
from tools.bench.harness.report import ROOT
from tools.bench.stream.experiment import Shape


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    name: str  # of the model, in the daemon
    shape: Shape
    device: str  # on which the weights are made and packed
    kv_bytes: int
    placing: dict[str, Any]  # of `djinn.PlacingOptions`


def hand_over(sharing: Sharing) -> None:
    """Raises DjinnError where it has not come to that; the process has said why."""
    command = [sys.executable, "-m", "tools.bench.stream.sharer", msgspec.json.encode(sharing).decode()]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise djinn.DjinnError(f"the client that was to hand over {sharing.shape.shape} has failed")


def main() -> None:
    from tools.checkpoints.random_model import DTYPES, described

    sharing = msgspec.json.decode(sys.argv[1], type=Sharing)
    shape = sharing.shape
    config, tensors, weights = described(
        shape.shape, DTYPES[shape.dtype], device=sharing.device, reduced=shape.reduced, blocks=shape.blocks or None
    )
    by_name = {tensor.name: tensor for tensor in tensors}
    djinn.share_model(
        lambda name: weights.values(by_name[name]),
        config,
        name=sharing.name,
        kv_bytes=sharing.kv_bytes,
        address=sharing.address,
        **sharing.placing,
    )


if __name__ == "__main__":
    main()
