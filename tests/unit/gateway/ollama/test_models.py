from __future__ import annotations

from djinn_client.protocol import ModelInfo, TokenizerInfo
from djinnd.gateway.ollama import models as ollama_models


def test_a_model_is_described_with_its_capabilities():
    info = ModelInfo(name="m", path="/m", family="llama", parameters=7_200_000_000, max_context=4096, dtype="bfloat16")
    template = "{% if tools %}…{% endif %}<think>"
    told = ollama_models.shown(info, TokenizerInfo(id=1, has_text=True, has_chat=True, chat_template=template))
    assert told["details"]["parameter_size"] == "7.2B"
    assert told["model_info"]["llama.context_length"] == 4096
    assert told["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    assert {"name", "modified_at", "size", "digest", "details"} <= ollama_models.tag(info).keys()
