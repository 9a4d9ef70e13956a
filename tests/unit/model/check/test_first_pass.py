from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from djinn_client.errors import ModelRejected
from djinnd.device.cpu import CpuDevice
from djinnd.model.check.first_pass import change_error
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import BLOCK_TOLERANCE, CHUNKS, SINGLES
from tests.support.loaded import MEMORY, check_all, load_weights, paged_model
from tests.support.models import reduced_model

PAGE = 16
CONTEXT = 512


def rows(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([[values]], dtype=dtype)


def test_an_error_counts_beside_what_a_block_adds() -> None:
    given, wanted = rows(100.0, 0.0), rows(100.0, 2.0)
    assert change_error(rows(100.0, 2.5), wanted, given).item() == pytest.approx(0.25)
    assert change_error(wanted, wanted, given).item() == 0


def test_one_rounding_of_a_large_number_is_no_error() -> None:
    given, wanted = rows(256.0, 0.0, dtype=torch.bfloat16), rows(256.0, 2.0, dtype=torch.bfloat16)
    next_one = rows(258.0, 2.0, dtype=torch.bfloat16)
    assert next_one[0, 0, 0] == 258.0, "no number of bfloat16 lies between"
    assert change_error(next_one, wanted, given).item() == 0
    assert change_error(rows(262.0, 2.0, dtype=torch.bfloat16), wanted, given).item() == 2


def test_a_block_that_changes_nothing_has_no_error() -> None:
    same = rows(1.0, 2.0)
    assert change_error(same, same, same).item() == 0


@pytest.fixture
def model() -> Iterator[PagedModel]:
    device = CpuDevice(MEMORY)
    yield paged_model(load_weights(reduced_model("llama-2"), device), 2 + (sum(CHUNKS) + SINGLES) // PAGE, PAGE)
    device.close()


class Noisy(nn.Module):
    """Adds noise to what single tokens get from an MLP."""

    def __init__(self, mlp: nn.Module, noise: float) -> None:
        super().__init__()
        self.mlp, self.noise = mlp, noise

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y * (1 + self.noise * torch.randn_like(y)) if x.shape[1] == 1 else y


def test_errors_of_several_blocks_do_not_add_up(model: PagedModel) -> None:
    noise = BLOCK_TOLERANCE[torch.float32] / 2
    for block in model.adapter.blocks:
        block.mlp = Noisy(block.mlp, noise)
    check_all(model, CONTEXT)
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.adapter.blocks)


@pytest.mark.parametrize("index", [0, 3])
def test_the_block_with_the_fault_is_named(model: PagedModel, index: int) -> None:
    block = model.adapter.blocks[index]
    block.mlp = Noisy(block.mlp, 0.5)
    with pytest.raises(ModelRejected, match=rf"llama fails the check at load: what block {index} adds in one pass"):
        check_all(model, CONTEXT)


def test_an_embedding_that_depends_on_the_pass_is_detected(model: PagedModel) -> None:
    embedding = model.adapter.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out * 1.1 if out.shape[1] == 1 else out)
    with pytest.raises(ModelRejected, match=r"its embeds in one pass over a prompt and token by token differ by 0\.1 "):
        check_all(model, CONTEXT)


def test_a_head_that_depends_on_the_pass_is_detected(model: PagedModel) -> None:
    head = model.adapter.language_model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, out: out * 1.1 if out.shape[1] == 1 else out)
    with pytest.raises(ModelRejected, match=r"its logits in one pass over a prompt and token by token differ by 0\.1 "):
        check_all(model, CONTEXT)
