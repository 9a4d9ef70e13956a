"""GgufCheckpoint: coded tensors are read decoded, or as the blocks of the file."""

from __future__ import annotations

from pathlib import Path

import torch

from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tests.support.gguf_files import Stored, f32, gguf_bytes
from tests.support.open_files import checkpoint_of

Q8_0 = 8


def test_parts_are_the_blocks_of_the_file_and_decode_to_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(256, (2, 3, 2, 34), dtype=torch.uint8) & 0xBF  # no half float is infinite
    metadata = {"general.architecture": "llama"} | {f"llama.{each}": 32 for each in SIZES}
    tensors: dict[str, Stored] = {
        "blk.0.ffn_down_exps.weight": (Q8_0, (2, 3, 64), blocks.numpy().tobytes()),
        "token_embd.weight": f32(torch.randn(4, 32)),
    }
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata | {"llama.attention.layer_norm_rms_epsilon": 0.5}, tensors))
    checkpoint = checkpoint_of(tmp_path / "m.gguf")
    assert checkpoint.coding("token_embd.weight") is None

    coding = checkpoint.coding("blk.0.ffn_down_exps.weight")
    assert coding == GgufBlocks(Q8_0)
    parts = [torch.empty(2, *part.shape, dtype=part.dtype) for part in coding.parts(3, 64)]
    checkpoint.read_parts("blk.0.ffn_down_exps.weight", parts)
    assert torch.equal(parts[0], blocks.view(2, 3, 68))
    out, whole = torch.empty(2, 3, 64), torch.empty(2, 3, 64)
    coding.decode(parts, out)
    checkpoint.read_into("blk.0.ffn_down_exps.weight", whole)
    assert torch.equal(out, whole)


SIZES = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
