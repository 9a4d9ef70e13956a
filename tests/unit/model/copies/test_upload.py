from __future__ import annotations

import numpy as np
import torch

from djinnd.model.copies.upload import upload

CPU = torch.device("cpu")


def test_integers_arrive_exactly():
    assert upload([3, (1 << 62) + 1], torch.int64, CPU).tolist() == [3, (1 << 62) + 1]


def test_columns_arrive_in_the_type_asked_for():
    column = upload([(0.1,), (2.0,)], torch.float64, CPU)
    assert column.dtype == torch.float64
    assert column.tolist() == [[0.1], [2.0]]


def test_arrays_arrive_as_lists_do():
    assert upload(np.array([3, (1 << 62) + 1]), torch.int64, CPU).tolist() == [3, (1 << 62) + 1]
    assert upload(np.empty(0, np.float32), torch.float32, CPU).shape == (0,)
