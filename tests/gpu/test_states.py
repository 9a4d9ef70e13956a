"""Single tokens of hybrid models on a CUDA device: kernels change the states where they are, and graphs hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.fast.state_steps import replace_steps
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.cuda import cuda_device
from tests.support.loaded import Served, random_prompt, small_pages

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FAMILIES = (
    *("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "nemotron_h", "granitemoehybrid", "bamba"),
    *("falcon_h1", "jamba", "mamba", "mamba2", "falcon_mamba"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_serve_the_modules_of_a_family(family: str, dtype: torch.dtype) -> None:
    skeleton = Skeleton(build(reduced(family), dtype))
    made = replace_steps(skeleton.adapter.blocks, skeleton.stateful, CUDA)
    assert made and all(told.in_place for told in made)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Sessions join and leave, so steps have padding rows. A fork begins with the pages of its parent."""
    folder = random_model(tmp_path / "model", reduced(family))
    with (
        cuda_device() as device,
        Served(folder, device, dtype="float32", plan=small_pages(120), max_batch_tokens=48) as served,
    ):
        assert served.runner.model.steps_in_place
        served.shuffle_pages()
        sessions = [served.open() for _ in range(5)]
        for number, session in enumerate(sessions):
            served.submit(session, random_prompt(1 + 9 * number, 300, number), max_tokens=8 + 5 * number)
        served.run()
        child = served.fork(sessions[-1])
        for session in (sessions[-1], child):
            served.submit(session, [], max_tokens=20)
        served.run()
        for number, session in enumerate([*sessions, child]):
            length = 1 + 9 * min(number, 4)
            told = session.tokens[length:]
            assert told == reference.greedy(folder, session.tokens[:length], len(told), told)
        graphs = served.runner.graphs.current
        assert graphs is not None and graphs.fitting(9, 1, 9) is None
        single = graphs.fitting(1, 1, 1)
        assert single is not None and not graphs.wants(single)  # it is captured


def test_a_replayed_step_writes_the_states_of_an_eager_one(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", reduced("qwen3_5_text"))
    with (
        cuda_device() as device,
        Served(folder, device, dtype="float32", plan=small_pages(120), max_batch_tokens=48) as served,
    ):
        session, states = served.open(), []
        served.submit(session, random_prompt(40, 300, 0), max_tokens=12)
        served.run()
        graphs = served.runner.graphs.current
        for used in (graphs, None):
            child = served.fork(session)
            served.runner.graphs.current = used
            served.submit(child, [], max_tokens=6)
            served.run()
            page = served.runner.model.pool[served.runner.kv.pages_of(child.id)[-1]]
            states.append((child.tokens, page[served.runner.model.layout.state_offset :].clone()))
        (first, replayed), (second, eager) = states
        assert first == second and torch.equal(replayed, eager)
