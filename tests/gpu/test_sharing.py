"""Weights that a client packed on the device are copied back to it from read-only pages."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import Tensor
from transformers import AutoModelForCausalLM

from djinn_client.handover.image_filling import fill, seal
from djinn_client.handover.named_tensors import NamedTensors
from djinn_client.protocol.fields.placing import Placing
from djinnd.engine.load.loading import map_image
from djinnd.model.placing.image import image_of
from tests.support.cuda import cuda_device
from tests.support.models import reduced_model
from tests.support.open_files import loader_of

pytestmark = pytest.mark.gpu


def test_every_shared_block_reaches_the_device_unchanged() -> None:
    folder = reduced_model("llama-2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    state = model.state_dict()
    fd = os.memfd_create("image", os.MFD_ALLOW_SEALING)
    with cuda_device() as device:
        loader = loader_of(folder, device, "bfloat16", Placing(resident=1), shared="bfloat16")
        image = image_of(loader)
        assert any(buffer.units for buffer in image.buffers)
        fill(fd, image, NamedTensors.of(state), lambda done, total: None)
        seal(fd)

        def arena(nbytes: int, fingerprint: str) -> tuple[Tensor, str | None]:
            return map_image(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), nbytes), ""

        weights = loader.run(arena, lambda stage, done, total: None, 0)  # registers the pages, read only
        os.close(fd)
        store = weights.store
        for index, buffer in enumerate(store.buffers[:-1]):
            form, source = store.forms[index], store.travelling(index)
            assert form is not None
            packed = torch.zeros(form.nbytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()  # the copy's stream does not wait for this one
            device.copy(packed[: len(source)], source).wait()
            plain = torch.empty(form.numel, dtype=torch.bfloat16, device="cuda")
            form.unpack(packed, plain)
            for name, tensor in buffer.layout.views(plain).items():
                assert torch.equal(tensor, state[buffer.name + name])
        del store
        weights.release(device)
