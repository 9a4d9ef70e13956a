"""KV in FP8: results are those of rounded keys and values wherever the pages have been, and never silently."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon
from tests.support.loaded import random_prompt
from tests.support.models import tiny_model
from tests.support.parameters import long_except

NEW = 6
NEAR_TIE = 2e-4  # of logits: other sums may round a key the other way
FAMILIES = {"hybrid": "qwen3_5_text", "latents": "deepseek_v3", "shared": "gemma4_text"}
MODELS = ("tiny", *FAMILIES)


class RoundedCache(DynamicCache):
    """Gives attention what it would find in pages: keys behind their rotary embedding, and values, in FP8."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def told_by(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of transformers with KV in FP8."""
    model, tokens = reference.model_of(folder), prompt
    cache = RoundedCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    told: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), **{name: cache}, use_cache=True).logits[0, -1]
            likeliest, second = logits.topk(2).values.tolist()
            assert likeliest - second > NEAR_TIE, "a near-tie: take another prompt"
            tokens = [int(logits.argmax())]
            told += tokens
    return told


def greedy(session: djinn.Session, prompt: list[int] | None = None) -> list[int]:
    return session.generate(prompt, max_tokens=NEW, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    others = {name: random_model(made / name, reduced(family)) for name, family in FAMILIES.items()}
    return {"tiny": tiny_model()} | others


def configured(folders: dict[str, Path]) -> dict[str, Any]:
    models = {name: {"path": str(folder), "kv_dtype": "fp8"} for name, folder in folders.items()}
    return {"memory": "4GiB", "models": models | {"plain": {"path": str(tiny_model())}}}


@pytest.fixture(scope="module")
def daemon(folders: dict[str, Path]) -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start(configured(folders), errors=["engine_lost"])


@pytest.mark.parametrize("model", long_except(("tiny", "hybrid"), MODELS))
def test_sessions_go_on_wherever_their_pages_have_been(folders: dict[str, Path], daemon: Daemon, model: str) -> None:
    prompt = random_prompt(600, 300, seed=3)
    told = told_by(folders[model], prompt, 3 * NEW)
    with djinn.Session(model, address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with s.fork() as fork:
            assert s.pause("disk").pages > 0 and s.info.pages == 0
            s.unpause()
            assert greedy(fork) == told[NEW : 2 * NEW]
        s.pause("host")
        s.unpause()
        assert greedy(s) == told[NEW : 2 * NEW]
        s.truncate(len(prompt) + NEW)
        assert greedy(s) == told[NEW : 2 * NEW]
        with djinn.Session(model, address=daemon.address) as other:  # finds the pages of the prompt
            assert greedy(other, prompt) == told[:NEW]
        assert greedy(s) == told[2 * NEW :]
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def test_a_prompt_in_chunks_beside_other_sessions_gives_the_same(folders: dict[str, Path], daemon: Daemon) -> None:
    prompts = [random_prompt(length, 300, seed=20 + length) for length in (1, 40, 300)]
    with daemon.client():
        sessions = [djinn.Session("tiny", address=daemon.address) for _ in prompts]
        streams = [s.stream(p, max_tokens=NEW, ignore_eos=True) for s, p in zip(sessions, prompts, strict=True)]
        answers = [[token for piece in stream for token in piece.token_ids] for stream in streams]
        for session in sessions:
            session.close()
    assert answers == [told_by(folders["tiny"], prompt, NEW) for prompt in prompts]


def test_a_page_takes_half_of_16_bits_and_a_quarter_of_32(daemon: Daemon) -> None:
    with daemon.client() as client:
        plain, fp8 = client.load("plain"), client.load("tiny")
        small = {"memory_bytes": 1 << 30, "kv_bytes": 8 << 20}
        plans = {form: client.plan(str(tiny_model()), **small, kv_dtype=form) for form in ("auto", "fp8")}
    assert plain.page_bytes / plain.page_size == 4 * fp8.page_bytes / fp8.page_size
    assert fp8.kv_layout.dtype == "float8_e4m3fn" and plain.kv_layout.dtype == "float32"
    assert (plans["fp8"].kv_dtype, plans["auto"].kv_dtype) == ("fp8", "")
    assert abs(plans["fp8"].kv_bytes - plans["auto"].kv_bytes) < 1 << 20  # as asked for, in more tokens


def test_listings_and_replies_say_so(daemon: Daemon) -> None:
    with djinn.Session("tiny", address=daemon.address) as s:
        assert "rounded to fp8" in " ".join(s.generate([5, 6], max_tokens=1).notes)
    with djinn.Session("plain", address=daemon.address) as s:
        assert s.generate([5, 6], max_tokens=1).notes == []
    with daemon.client() as client:
        found = {info.name: (info.kv_dtype, " ".join(info.notes)) for info in client.models() if info.kv is not None}
    assert found["tiny"][0] == "fp8" and "keys and values are rounded to fp8" in found["tiny"][1]
    assert found["plain"][0] == "" and "rounded" not in found["plain"][1]


def test_kv_is_handed_over_to_models_with_the_same_form_only(folders: dict[str, Path], daemon: Daemon) -> None:
    prompt = random_prompt(300, 300, seed=5)
    told = told_by(folders["tiny"], prompt, 2 * NEW)
    with djinn.Session("tiny", address=daemon.address) as s, djinn.Session("plain", address=daemon.address) as p:
        assert greedy(s, prompt) == told[:NEW]
        kv = s.kv()
        assert kv.pages.dtype == torch.float8_e4m3fn and kv.tokens is not None
        with djinn.Session.from_kv("tiny", kv.tokens, kv, address=daemon.address) as other:
            assert greedy(other) == told[NEW:]
        with pytest.raises(djinn.InvalidRequest, match="or load the model with kv_dtype=fp8"):
            djinn.Session.from_kv("plain", kv.tokens, kv, address=daemon.address)
        greedy(p, prompt)
        with pytest.raises(djinn.InvalidRequest, match="or load the model with kv_dtype=auto"):
            djinn.Session.from_kv("tiny", p.token_ids(), p.kv(), address=daemon.address)


def test_kv_that_a_client_puts_into_a_window_is_rounded(daemon: Daemon) -> None:
    window = djinn.kv_window("tiny", 3, address=daemon.address)
    heads, width = window.layout.kv_heads, window.layout.head_dim
    key = torch.full((3, heads, width), 1e6)
    window.put(0, key, -key)
    assert torch.equal(window.key(0).float(), key.clamp(max=448)) and window.value(0).float().min() == -448
    window.close()


def test_a_loaded_model_keeps_its_form(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("plain")
        with pytest.raises(djinn.InvalidRequest, match="unload it first"):
            client.load("plain", kv_dtype="fp8")


def test_a_model_without_kv_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "mamba", reduced("mamba2"))
    with daemon.client() as client, pytest.raises(djinn.InvalidRequest, match="has no KV"):
        client.plan(str(folder), kv_dtype="fp8")


@pytest.mark.long
@pytest.mark.parametrize("warm", [True, False])
def test_a_session_outlives_its_daemon(folders: dict[str, Path], daemon: Daemon, warm: bool) -> None:
    prompt = random_prompt(600, 300, seed=9 + warm)
    told = told_by(folders["tiny"], prompt, 2 * NEW)
    with djinn.Session("tiny", address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with daemon.client() as client:
            restart(client, warm=warm)
        with djinn.Session.attach(s.id, address=daemon.address) as again:
            assert greedy(again) == told[NEW:]


def test_pages_on_disk_are_not_found_by_a_daemon_with_another_form(
    folders: dict[str, Path], start_daemon: DaemonStarter
) -> None:
    """The session goes on from its tokens, computed again."""
    prompt = random_prompt(600, 300, seed=8)
    first = start_daemon({"models": {"m": {"path": str(folders["tiny"]), "kv_dtype": "fp8"}}})
    s = djinn.Session("m", address=first.address)
    told = greedy(s, prompt)
    assert told == told_by(folders["tiny"], prompt, NEW)
    s.pause("disk")
    s.unpause()
    s.detach()
    first.kill()
    settings = {"socket": first.address, "state_dir": f"{Path(first.address).parent}/state"}
    start_daemon(settings | {"models": {"m": {"path": str(folders["tiny"])}}})
    with djinn.Session.attach(s.id, address=first.address) as again:
        reply = again.generate(max_tokens=NEW, ignore_eos=True)
        assert reply.usage.computed_tokens >= len(prompt)
        assert reply.token_ids == reference.greedy(folders["tiny"], prompt + told, NEW)
        assert reply.notes == []
