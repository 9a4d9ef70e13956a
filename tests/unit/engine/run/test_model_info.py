from __future__ import annotations

from djinnd.engine.run.model_info import info_of
from tests.support.loaded import Served, random_prompt
from tests.support.models import reduced_model

VOCAB = 512
FOLDER = reduced_model("llama-2")


def test_a_model_is_described_with_its_memory_and_its_pages() -> None:
    with Served(FOLDER, max_batch_tokens=64) as served:
        info = info_of(served.runner)
        assert (info.name, info.family, info.state, info.dtype, info.blocks) == ("m", "llama", "ready", "float32", 4)
        assert (info.vocab, info.max_context, info.page_size) == (VOCAB, 2048, 256)
        assert info.kv_bytes == (info.pages + 1) * info.page_bytes
        assert info.parameters * 4 <= info.weight_bytes < served.device.budget.used
        assert info.pages_used == 0
        served.submit(served.open(), random_prompt(300, VOCAB, 0), max_tokens=1)
        served.run()
        assert info_of(served.runner).pages_used == 2
