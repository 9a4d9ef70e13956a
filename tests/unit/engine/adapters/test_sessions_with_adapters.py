"""Sessions with adapters on a real engine give what the merged checkpoints give, whatever else is in the batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from djinnd import messages
from tests.support import reference
from tests.support.adapters import merged, write_adapter
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

MODEL = reduced_model("llama-2")
NEW = 6
MOST = 1 << 30
KINDS = [  # of five adapters, as PEFT writes them
    {},
    {"rank": 16, "use_rslora": True},
    {"rank": 8, "targets": ("q_proj", "v_proj"), "lora_alpha": 4},
    {"rank": 4, "targets": ("k_proj", "up_proj", "down_proj"), "alpha_pattern": {"layers.0.self_attn.k_proj": 32}},
    {"rank": 3, "rank_pattern": {"v_proj": 5, "gate_proj": 1}},
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), MODEL, seed, **kind) for seed, kind in enumerate(KINDS)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoints(adapters: list[Path]) -> list[Path]:
    """The merged checkpoint of each adapter, and the model without one."""
    return [*(merged(folder.with_name(f"merged-{folder.name}"), MODEL, folder) for folder in adapters), MODEL]


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        engine.loaded(MODEL)
        yield engine


def load(engine: EngineThread, folder: Path, most: int = MOST) -> messages.AdapterLoaded | messages.Failed:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    fds = [os.open(folder / name, os.O_RDONLY) for name in names]
    number = engine.number()
    engine.send(messages.LoadAdapter(number, "m", str(folder), names, most), fds=fds)
    for fd in fds:
        os.close(fd)
    answer = engine.receive()
    assert isinstance(answer, messages.AdapterLoaded | messages.Failed) and answer.request == number
    return answer


def loaded(engine: EngineThread, folder: Path) -> bytes:
    answer = load(engine, folder)
    assert isinstance(answer, messages.AdapterLoaded)
    return answer.identity


def open_with(engine: EngineThread, session: str, adapter: bytes, tokens: list[int] | None = None) -> None:
    engine.send(messages.Open(session, "m", 0, "agent", tokens or [], adapter=adapter))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, 512, seed)


def test_sixteen_sessions_with_five_adapters_and_none_in_one_batch(
    engine: EngineThread, adapters: list[Path], checkpoints: list[Path]
) -> None:
    identities = [*(loaded(engine, folder) for folder in adapters), b""]
    prompts = {n: prompt(3 + 7 * n, n) for n in range(16)}
    runs = {}
    for n, tokens in prompts.items():
        open_with(engine, f"s{n}", identities[n % 6])
        runs[n] = engine.run_message(f"s{n}", tokens, NEW)
    engine.send(*runs.values())
    outcomes = engine.outcomes([run.request for run in runs.values()])
    for n in sorted(prompts, key=lambda each: each % 6):  # the reference keeps one model in memory
        told, _ = outcomes[runs[n].request]
        assert told == reference.greedy(checkpoints[n % 6], prompts[n], NEW, told), n
    engine.report()
