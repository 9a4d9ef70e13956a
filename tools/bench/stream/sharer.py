"""A client that hands a model over. It makes random weights of a shape on request, so that 140 GB need not be in
memory.

    python -m tools.bench.stream.sharer JSON      a Sharing; ends when the model is served

It is a process of its own, so that only the daemon holds device memory while it is measured. The model stays in the
daemon for the time that a lost client has to come back (`limits.session_grace`).
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
    device: str  # device that makes and packs the weights
    kv_bytes: int
    placing: dict[str, Any]  # of `djinn.PlacingOptions`


def hand_over(sharing: Sharing) -> None:
    """Runs the client to its end. Raises DjinnError where it fails; its log tells the reason."""
    command = [sys.executable, "-m", "tools.bench.stream.sharer", msgspec.json.encode(sharing).decode()]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise djinn.DjinnError(f"the client that was to hand over {sharing.shape.shape} has failed")


def main() -> None:
    from tools.checkpoints.random_models.model import DTYPES, described

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
