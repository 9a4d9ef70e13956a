"""Log probabilities of prompts on CUDA, beside sessions that decode by graphs."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol import PromptLogprobs, Sampling
from djinnd.messages import PromptScored
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu

VOCAB = 512
FOLDER = reduced_model("llama-2")


def test_prompt_scores_equal_transformers_beside_sessions_that_decode() -> None:
    parts: dict[int, list[PromptScored]] = {}
    with (
        cuda_device() as device,
        Served(FOLDER, device, dtype="float32", plan=small_pages(200), max_batch_tokens=48) as served,
    ):
        talkers = [served.open() for _ in range(3)]
        sampling = Sampling(frequency_penalty=0.3, min_tokens=20)
        for number, talker in enumerate(talkers):
            served.submit(talker, random_prompt(9, VOCAB, number), max_tokens=40, sampling=sampling)
        for _ in range(8):
            served.step()
        scored = [served.open() for _ in range(2)]
        requests = [
            served.submit(session, random_prompt(120, VOCAB, 9), max_tokens=4, prompt_logprobs=count)
            for session, count in zip(scored, (0, 3), strict=True)
        ]
        while served.step() is not None:
            for part in served.runner.scores.take():
                parts.setdefault(part.request, []).append(part)
        assert served.runner.graphs.current is not None
    wanted = torch.from_numpy(reference.logits(FOLDER, scored[0].tokens[:120])).log_softmax(-1)[:-1]
    for request in requests:
        values = b"".join(part.values for part in parts[request.id])
        ids = b"".join(part.ids for part in parts[request.id])
        told = PromptLogprobs(119, 0, request.prompt_logprobs or 0, values, ids)
        for entry, row, token in zip(told, wanted, scored[0].tokens[1:120], strict=True):
            assert entry is not None and entry.token == pytest.approx(row[token].item(), abs=1e-3)
            top = row.topk(len(entry.top)).values.tolist()
            assert [*entry.top.values()] == pytest.approx(top, abs=1e-3)
