"""Checkpoints of 16 bits that are quantised when they are loaded: smaller, near the original, and never silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway, close_conversations
from tests.support.gguf_files import write_as_gguf
from tests.support.models import tiny_model

PROMPT = "def parse(text):\n    "


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    path = str(tiny_model())
    models = {"plain": {"path": path}, "fp8": {"path": path, "quantise": "fp8", "kv_dtype": "fp8"}}
    with DaemonStarter() as start:
        yield start({"models": models})


@pytest.fixture(scope="module")
def gateway(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway"), daemon.address) as running:
        yield running
    close_conversations(daemon)


def test_results_stay_near_the_checkpoint_s_and_every_reply_says_so(daemon: Daemon) -> None:
    told = {}
    for name in ("plain", "fp8"):
        with djinn.Session(name, address=daemon.address) as session:
            told[name] = session.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=5)
    assert told["plain"].notes == []
    assert "quantised to fp8" in " ".join(told["fp8"].notes)
    first, other = (told[name].logprobs[0] for name in ("plain", "fp8"))
    assert first != other
    assert abs(first.token - other.token) < 0.5


def test_listings_and_plans_name_the_code(daemon: Daemon) -> None:
    with daemon.client() as client:
        plain, fp8 = client.load("plain"), client.load("fp8")
        plan = client.plan(str(tiny_model()), memory_bytes=1 << 30, quantise="int8")
        told = client.plan("plain", memory_bytes=1 << 30)
    assert (plain.codes, plain.quantised) == ([], "")
    assert (fp8.codes, fp8.quantised) == (["fp8"], "fp8")
    assert plain.fingerprint != fp8.fingerprint
    assert (plan.codes, plan.quantised) == (["int8"], "int8")
    assert plan.host_bytes < told.host_bytes


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}], ids=["whole", "streamed", "twice"])
def test_http_has_the_notes_in_a_header(daemon: Daemon, gateway: Gateway, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | fields
    quantised, plain = (gateway.post("/v1/completions", body | {"model": name}) for name in ("fp8", "plain"))
    assert quantised.status == plain.status == 200
    told = quantised.headers["x-djinn-notes"]
    assert told.count("quantised to fp8") == 1 and told.count("rounded to fp8") == 1
    assert "x-djinn-notes" not in plain.headers
    listed = gateway.get("/v1/models/fp8").json
    assert (listed["quantised"], listed["kv_dtype"]) == ("fp8", "fp8")


def test_weights_in_a_code_are_not_quantised_again(daemon: Daemon, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_as_gguf(tiny_model(), tmp_path / "m-Q8_0.gguf", "llama", "Q8_0")
    with daemon.client() as client, pytest.raises(djinn.InvalidRequest, match="only weights of 16 or 32 bits"):
        client.plan(str(tmp_path / "m-Q8_0.gguf"), quantise="fp8")
