from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.edit_rows import CODES, EditRows
from djinnd.model.whitebox.editing import apply
from tests.support.paged import same_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edits_on_the_device_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    target, bank = (torch.randn(9, 4096, generator=generator).to(dtype) for _ in range(2))
    codes = torch.tensor([*CODES.values()], dtype=torch.int32)
    limits = [torch.full((len(codes),), each) for each in (0.7, -0.1, 0.1)]
    where, value = torch.tensor([8, 0, 3, 5, 1]), torch.tensor([2, 1, 4, 0, 8])
    got = target.cuda()
    before = got.clone()
    on_device = (each.cuda() for each in (codes, *limits, value, bank))
    apply(got, where.cuda(), EditRows(*on_device))
    apply(target, where, EditRows(codes, *limits, value, bank))
    torch.testing.assert_close(got.cpu(), target)
    assert same_bytes(got[[2, 4, 6, 7]], before[[2, 4, 6, 7]])
