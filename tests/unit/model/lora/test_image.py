from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.model.lora.image import LoraImage, read_image
from djinnd.model.lora.targets import Target
from tests.support.adapters import write_adapter
from tests.support.models import reduced_model

MODEL = reduced_model("llama-2")
LAYER = "model.layers.0."
# Of block 0 of the reduced model: a joined product, and a module of its own.
TARGETS = [
    Target(nn.Identity(), 64, LAYER, tuple(f"self_attn.{name}_proj" for name in "qkv"), (64, 64, 64)),
    Target(nn.Identity(), 64, LAYER, ("self_attn.o_proj",), (64,)),
]


def read(folder: Path, most: int = 1 << 20, dtype: torch.dtype = torch.float32) -> LoraImage:
    with ModelFiles.open(str(folder)) as files:
        return read_image(files, TARGETS, dtype, most)


def only_block_0(tmp_path: Path, **more: object) -> Path:
    targets = more.pop("targets", ("0.self_attn.q_proj", "0.self_attn.v_proj"))
    return write_adapter(tmp_path / "adapter", MODEL, targets=targets, **more)  # type: ignore[arg-type]


def test_parts_of_a_product_share_one_pair_with_zeros_for_what_has_none(tmp_path: Path) -> None:
    folder = only_block_0(tmp_path, rank=4, rank_pattern={"v_proj": 2})
    image = read(folder)
    assert (image.rank, image.modules, list(image.places)) == (4, 2, [0])
    a, b = image.pairs(image.memory, TARGETS)[0]
    assert (a.shape, b.shape) == ((12, 64), (192, 4))
    assert not a[4:8].any() and not a[10:].any() and not b[64:128].any() and not b[128:, 2:].any()
    assert a[:4].any() and a[8:10].any()


def test_the_identity_follows_from_the_contents(tmp_path: Path) -> None:
    folders = [only_block_0(tmp_path / str(n), seed=n // 2) for n in range(4)]
    identities = [read(folder).identity for folder in folders]
    assert identities[0] == identities[1] != identities[2] == identities[3]
    other_alpha = only_block_0(tmp_path / "alpha", lora_alpha=17)
    assert read(other_alpha).identity not in identities


def test_the_bytes_are_bounded(tmp_path: Path) -> None:
    folder = only_block_0(tmp_path)
    nbytes = read(folder).memory.nbytes
    assert read(folder, most=nbytes).memory.nbytes == nbytes
    with pytest.raises(ModelRejected, match=f"takes {nbytes:,} bytes; at most {nbytes - 1:,}"):
        read(folder, most=nbytes - 1)


A, B = (f"base_model.model.{LAYER}self_attn.o_proj.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({f"base_model.model.{LAYER}mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "is not served"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lm_head.* is not served"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 64)}, "is not served"),
        ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(64)}, "is not served"),
        ({A: torch.ones(4, 64)}, "no lora_B of .*o_proj"),
        ({A: torch.ones(4, 64), B: torch.ones(64, 5)}, "belongs to another model"),
        ({A: torch.ones(4, 32), B: torch.ones(64, 4)}, "belongs to another model"),
        ({A: torch.ones(129, 64), B: torch.ones(64, 129)}, "rank 129; ranks from 1 to 128"),
        ({A: torch.ones(0, 64), B: torch.ones(64, 0)}, "rank 0; ranks from 1 to 128"),
        ({A: torch.ones(4, 64).int(), B: torch.ones(64, 4)}, "matrices in F32, F16 or BF16"),
        ({A: torch.full((4, 64), torch.nan), B: torch.ones(64, 4)}, "no numbers"),
    ],
)
def test_tensors_that_are_not_served(tmp_path: Path, extra: dict[str, Tensor], told: str) -> None:
    with pytest.raises(ModelRejected, match=told):
        read(only_block_0(tmp_path, extra=extra))


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    folder = only_block_0(tmp_path)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelRejected, match="damaged or cut short"):
        read(folder)
