from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from djinnd.device.cpu import CpuDevice
from djinnd.model.step.inputs import StepInputs


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 20)
    yield device
    device.close()


def numbered(inputs: StepInputs) -> dict[str, list[int]]:
    """Fills each array with different numbers, and returns them."""
    for number, array in enumerate(inputs.host.values()):
        array[...] = np.arange(array.size).reshape(array.shape) + 1000 * number
    return {name: array.flatten().tolist() for name, array in inputs.host.items()}


@pytest.mark.parametrize(("tokens", "rows", "width"), [(7, 3, 5), (1, 1, 1), (4, 4, 0), (2, 5, 1)])
def test_one_copy_brings_everything(device: CpuDevice, tokens: int, rows: int, width: int) -> None:
    inputs = StepInputs(device, tokens, rows, width)
    wanted = numbered(inputs)
    inputs.send()
    batch = inputs.paged_batch(max_query=3, max_kv=9, fresh=True)
    assert inputs.ids.tolist() == [wanted["ids"]] and inputs.ids.dtype == torch.int64
    assert inputs.positions.tolist() == [wanted["positions"]]
    assert inputs.logit_rows(rows).tolist() == wanted["logit_rows"][:rows]  # a row may have logits whatever its tokens
    assert batch.query_starts.tolist() == wanted["starts"] and len(wanted["starts"]) == rows + 1
    assert batch.kv_lengths.tolist() == wanted["lengths"]
    assert batch.slots.tolist() == wanted["slots"] and batch.slots.dtype == torch.int64
    assert batch.page_table.shape == (rows, width) and batch.page_table.dtype == torch.int32
    assert batch.page_table.flatten().tolist() == wanted["table"]
    assert (batch.max_query, batch.max_kv, batch.fresh) == (3, 9, True)


def test_every_array_is_aligned(device: CpuDevice) -> None:
    inputs = StepInputs(device, 3, 2, 3)
    batch = inputs.paged_batch(max_query=1, max_kv=1, fresh=False)
    tensors = [inputs.ids, inputs.positions, inputs.logit_rows(3), batch.slots]
    tensors += [batch.query_starts, batch.kv_lengths, batch.page_table, batch.worklist, batch.extent]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def test_inputs_that_are_sent_again_keep_their_addresses(device: CpuDevice) -> None:
    inputs = StepInputs(device, 2, 2, 2)
    batch = inputs.paged_batch(max_query=1, max_kv=1, fresh=False)
    inputs.host["slots"][:] = (5, 6)
    inputs.host["lengths"][:] = (7, 8)
    inputs.send()
    assert (batch.slots.tolist(), batch.kv_lengths.tolist()) == ([5, 6], [7, 8])


def test_each_replay_sends_the_inputs_that_are_sealed_at_that_time(device: CpuDevice) -> None:
    """A graph captures the copy once, and each replay sends as much as is sealed at that time."""
    inputs = StepInputs(device, 4, 2, 4)
    table = inputs.paged_batch(max_query=1, max_kv=1, fresh=False).page_table
    table.fill_(-1)
    for number, counts in enumerate(([3, 0], [1, 1], [4, 0])):
        inputs.host["starts"][:] = (0, *np.cumsum(counts))
        inputs.host["ids"][:] = number
        inputs.host["table"][:] = number
        inputs.seal()
        inputs.send_sealed()
        assert inputs.ids.tolist() == [[number] * 4]
        assert table.tolist() == [[number] * 4, [-1 if number == 0 else 1] * 4]


@pytest.mark.parametrize(("tokens", "rows", "logit_rows"), [(0, 0, 0), (1, 1, 1), (5, 2, 1), (6, 4, 4)])
def test_padding_is_written_to_the_scratch_page_and_not_read(
    device: CpuDevice, tokens: int, rows: int, logit_rows: int
) -> None:
    """Padding is tokens that belong to no row, and rows without tokens."""
    inputs = StepInputs(device, 6, 4, 3)
    before = numbered(inputs)
    inputs.pad(tokens, rows, logit_rows)
    host = inputs.host
    for name, kept in (("ids", tokens), ("positions", tokens), ("slots", tokens), ("logit_rows", logit_rows)):
        assert host[name].tolist() == before[name][:kept] + [0] * (6 - kept)
    assert host["starts"].tolist() == before["starts"][:rows] + [tokens] * (5 - rows)
    assert host["lengths"].tolist() == before["lengths"][:rows] + [0] * (4 - rows)


def test_only_used_rows_of_the_page_table_are_sent(device: CpuDevice) -> None:
    inputs = StepInputs(device, 6, 5, 3)
    table = inputs.paged_batch(max_query=1, max_kv=1, fresh=False).page_table
    table.fill_(-1)
    inputs.host["table"][:] = 7
    inputs.host["starts"][:] = (0, 1, 1, 4, 4, 4)
    inputs.send()
    sent = table.flatten().tolist()
    assert sent[:9] == [7] * 9 and sent[12:] == [-1] * 3  # 128 bits at a time


def test_visits_have_chunks_before_single_tokens(device: CpuDevice) -> None:
    inputs = StepInputs(device, 8, 6, 1)
    batch = inputs.paged_batch(max_query=1, max_kv=1, fresh=False)
    inputs.host["starts"][:] = (0, 1, 3, 3, 4, 8, 8)
    inputs.host["lengths"][:] = (10, 11, 0, 13, 14, 0)
    inputs.send()
    assert batch.worklist.tolist()[:4] == [[1, 1, 2, 11], [4, 4, 4, 14], [0, 0, 1, 10], [3, 3, 1, 13]]
    assert batch.extent.tolist() == [2, 4, 4, 13]
    inputs.host["starts"][:] = (0, 1, 2, 3, 3, 3, 3)
    inputs.send()
    assert batch.worklist.tolist()[:3] == [[0, 0, 1, 10], [1, 1, 1, 11], [2, 2, 1, 0]]
    assert batch.extent.tolist() == [0, 1, 3, 11]
    inputs.pad(0, 0, 0)
    inputs.send()
    assert batch.extent.tolist() == [0, 0, 0, 0]
