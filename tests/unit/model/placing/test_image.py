"""A client that fills a model's image gets the bytes that the engine makes of the same model's checkpoint."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from djinn_client.errors import ModelRejected, OutOfMemory
from djinn_client.handover.image_filling import fill, seal
from djinn_client.handover.named_tensors import NamedTensors
from djinn_client.protocol.fields.image import Image
from djinn_client.transport.shm import map_read_only
from djinnd.device.cpu import CpuDevice
from djinnd.model.placing.image import image_of
from djinnd.model.placing.loader import MAX_BLOCKS
from djinnd.weights.filling import fill as fill_from_checkpoint
from tests.support.checkpoints import altered, cast
from tests.support.loaded import MEMORY
from tests.support.models import reduced_model
from tests.support.open_files import loader_of
from tests.support.parameters import FEW_FAMILIES


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("image", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def image_in(fd: int, image: Image, tensors: NamedTensors) -> Tensor:
    """Fills and seals the image, and maps it as the engine does."""
    told: list[tuple[int, int]] = []
    fill(fd, image, tensors, lambda done, total: told.append((done, total)))
    assert told[-1] == (image.nbytes, image.nbytes) and len(told) == len(image.buffers)
    seal(fd)  # the kernel refuses this while a writable mapping exists
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return torch.frombuffer(map_read_only(reader, image.nbytes), dtype=torch.uint8)
    finally:
        os.close(reader)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_a_filled_image_equals_the_store(
    family: str, device: CpuDevice, fd: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = altered(tmp_path_factory.mktemp("bf16"), family, lambda tensors: cast(tensors, torch.bfloat16))
    theirs = loader_of(folder, device, "bfloat16").store
    theirs.attach(torch.frombuffer(mmap.mmap(-1, theirs.nbytes), dtype=torch.uint8))
    fill_from_checkpoint(theirs, device, lambda done, total: None)

    loader = loader_of(folder, device, "bfloat16", shared="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = loader.store
    ours.attach(image_in(fd, image_of(loader), NamedTensors.of(model)))
    assert (ours.is_packed, ours.nbytes) == (theirs.is_packed, theirs.nbytes)
    for index, buffer in enumerate(ours.buffers):
        plain = []
        for store in (ours, theirs):
            form, stored = store.forms[index], store.travelling(index)
            if form is not None:
                packed = torch.zeros(form.nbytes, dtype=torch.uint8)
                packed[: len(stored)] = stored
                stored = torch.zeros(form.numel, dtype=torch.bfloat16)
                form.unpack(packed, stored)
            plain.append(buffer.layout.views(stored))
        for name in buffer.layout.entries:
            assert torch.equal(plain[0][name].view(torch.int16), plain[1][name].view(torch.int16)), buffer.name + name


def test_weights_of_another_dtype_are_converted_to_the_image_s(device: CpuDevice, fd: int) -> None:
    loader = loader_of(reduced_model("llama-2"), device, "float32", shared="float16")
    image = image_of(loader)
    assert image.dtype == "float16" and not any(buffer.units for buffer in image.buffers)
    model = AutoModelForCausalLM.from_pretrained(reduced_model("llama-2"), dtype=torch.float32)
    loader.store.attach(image_in(fd, image, NamedTensors.of(model)))
    views = loader.store.buffers[-1].layout.views(loader.store.host(4))
    assert torch.equal(views["lm_head.weight"], model.lm_head.weight.half())


def test_a_tied_tensor_is_found_under_any_of_its_names(device: CpuDevice) -> None:
    folder = reduced_model("gpt2")
    image = image_of(loader_of(folder, device, "float32", shared="float32"))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    assert any(tensor.names == [embedding, head] for tensor in image.buffers[-1].tensors)
    assert NamedTensors.of(state).names_for(image)[embedding] == embedding
    assert NamedTensors.of({k: v for k, v in state.items() if k != embedding}).names_for(image)[embedding] == head
    copied = state | {head: state[head].clone()}
    assert NamedTensors.of(copied).names_for(image)[embedding] == embedding
    with pytest.raises(ModelRejected, match=f"{embedding} and {head} are one tensor, but they differ"):
        NamedTensors.of(state | {head: state[head] + 1}).names_for(image)


def test_an_image_that_does_not_fit_the_host_is_refused(device: CpuDevice, fd: int) -> None:
    image = image_of(loader_of(reduced_model("llama-2"), device, "float32", shared="float32"))
    huge = Image(image.dtype, 1 << 60, image.buffers)
    model = AutoModelForCausalLM.from_pretrained(reduced_model("llama-2"), dtype=torch.float32)
    with pytest.raises(OutOfMemory, match="takes 1,152,921,504,606,846,976 bytes of host memory"):
        fill(fd, huge, NamedTensors.of(model), lambda done, total: None)
    assert os.fstat(fd).st_size == 0


def test_a_model_with_too_many_blocks_is_refused(device: CpuDevice, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = altered(tmp_path_factory.mktemp("deep"), config={"num_hidden_layers": MAX_BLOCKS + 1})
    with pytest.raises(ModelRejected, match="at most 1,024"):
        loader_of(folder, device, "float32", shared="float32")
