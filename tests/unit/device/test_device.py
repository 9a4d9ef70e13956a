from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch

from djinn_client.errors import InvalidRequest
from djinnd.device import open_device
from djinnd.device.cpu import CpuDevice
from djinnd.device.cuda import CudaDevice

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_cpu_opens_the_cpu() -> None:
    device = open_device("cpu", 1 << 30)
    assert isinstance(device, CpuDevice)
    assert (device.name, device.budget.total) == ("cpu", 1 << 30)
    assert "CPU" in device.description
    device.close()


@without_cuda
def test_auto_opens_the_cpu_without_a_gpu() -> None:
    device = open_device("auto", 1 << 30)
    assert isinstance(device, CpuDevice)
    device.close()


@without_cuda
@pytest.mark.parametrize("name", ["cuda:0", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    assert not CudaDevice.available()
    with pytest.raises(InvalidRequest, match=f"device {name} is not there.*djinnctl doctor"):
        open_device(name, 0)


def test_work_in_computing_runs_on_the_calling_thread() -> None:
    device = open_device("cpu", 1 << 20)
    with device.computing():
        out = torch.ones(3) + 1
    assert out.tolist() == [2.0] * 3
    device.close()


def test_idle_time_counts_from_the_end_of_the_last_computing_thread() -> None:
    device = open_device("cpu", 1 << 20)
    assert device.idle_s == math.inf
    with device.computing():
        with device.computing():
            assert device.idle_s == 0
        assert device.idle_s == 0
    first = device.idle_s
    assert 0 <= first <= device.idle_s < math.inf
    with suppress(ZeroDivisionError), device.computing():
        raise ZeroDivisionError
    assert device.idle_s < math.inf
    device.close()
