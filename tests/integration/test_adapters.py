"""Sessions with LoRA adapters give what the merged checkpoints give: beside each other, forked, paused, after the loss
of the engine, and after a restart of the daemon."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import djinn_client as djinn
from djinn_client import errors
from djinnctl.cli import main
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.adapters import merged, write_adapter
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model
from tests.support.serving import TINY

MODEL = reduced_model("llama-2")
NEW = 8
PROMPT = random_prompt(300, 512, 3)  # more than a page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    return write_adapter(folder / "a", MODEL, 1, rank=8)


@pytest.fixture(scope="module")
def checkpoint(folder: Path, adapter: Path) -> Path:
    """The adapter merged into the model."""
    return merged(folder / "merged", MODEL, adapter)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    configured = write_adapter(folder / "configured", MODEL, 2)
    painter = write_adapter(folder / "painter", MODEL, 3)
    named = {"poet": str(configured), "painter": str(painter)}
    models = {"llama": {"path": str(MODEL), "adapters": named}}
    with DaemonStarter() as start:
        yield start({"models": models}, errors=["engine_lost"])


def expect(checkpoint: Path, before: Sequence[int], told: list[int]) -> None:
    assert told == reference.greedy(checkpoint, before, len(told), told)


def test_each_session_computes_with_its_own_adapter_and_none_finds_anothers_pages(
    daemon: Daemon, folder: Path, adapter: Path, checkpoint: Path
) -> None:
    told, prompt = {}, random_prompt(300, 512, 4)  # no other test has computed it
    for name in (adapter, None, "poet", adapter):
        with djinn.Session("llama", adapter=name, address=daemon.address) as s:
            result = s.generate(prompt, max_tokens=NEW)
            told[name] = result.token_ids
            cached = len(prompt) - result.usage.computed_tokens
            assert (cached > 0) == (name in told and name is adapter and len(told) == 3)
    expect(checkpoint, prompt, told[adapter])
    expect(merged(folder / "merged-poet", MODEL, folder / "configured"), prompt, told["poet"])
    expect(MODEL, prompt, told[None])


def test_forked_paused_and_truncated(daemon: Daemon, adapter: Path, checkpoint: Path) -> None:
    with djinn.Session("llama", adapter=adapter, address=daemon.address) as s:
        first = s.generate(PROMPT, max_tokens=NEW).token_ids
        with s.fork() as fork:
            assert fork.info.adapter == s.info.adapter != ""
            s.pause("host")
            s.unpause()
            ours, theirs = (each.generate([7], max_tokens=NEW).token_ids for each in (s, fork))
        expect(checkpoint, [*PROMPT, *first, 7], ours)
        assert theirs == ours
        s.truncate(10)
        expect(checkpoint, [*PROMPT[:10], 9], s.generate([9], max_tokens=NEW).token_ids)


def test_logits(daemon: Daemon, adapter: Path, checkpoint: Path) -> None:
    with djinn.Session("llama", adapter=adapter, address=daemon.address) as s:
        given = s.forward(PROMPT[:40])
        assert abs(given - reference.logits(checkpoint, PROMPT[:40])).max() < 1e-4


def test_the_loss_of_the_engine(daemon: Daemon, adapter: Path, checkpoint: Path) -> None:
    with djinn.Session("llama", adapter=adapter, address=daemon.address) as s:
        first = s.generate(PROMPT, max_tokens=NEW).token_ids
        daemon.kill_engine()
        expect(checkpoint, [*PROMPT, *first, 7], s.generate([7], max_tokens=NEW).token_ids)


@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_restart_of_the_daemon(daemon: Daemon, adapter: Path, checkpoint: Path, warm: bool) -> None:
    with djinn.Session("llama", adapter=adapter, address=daemon.address) as s:
        first = s.generate(PROMPT, max_tokens=NEW).token_ids
        with daemon.client() as client:
            restart(client, warm=warm)
        with djinn.Session.attach(s.id, address=daemon.address) as again:
            expect(checkpoint, [*PROMPT, *first, 7], again.generate([7], max_tokens=NEW).token_ids)
        assert djinn.status(check=True, address=daemon.address).integrity == []


def test_a_folder_that_was_trained_anew(daemon: Daemon, folder: Path, adapter: Path, checkpoint: Path) -> None:
    """A session stays with the files that it was opened with, until a restart finds other ones."""
    trained = Path(shutil.copytree(adapter, folder / "trained"))
    with djinn.Session("llama", adapter=trained, address=daemon.address) as s:
        first = s.generate(PROMPT, max_tokens=NEW).token_ids
        shutil.rmtree(trained)
        write_adapter(trained, MODEL, 9)
        expect(checkpoint, [*PROMPT, *first, 7], s.generate([7], max_tokens=1).token_ids)
        with djinn.Session("llama", adapter=trained, address=daemon.address) as other:
            told = other.generate(PROMPT, max_tokens=NEW).token_ids
            expect(merged(folder / "merged-anew", MODEL, trained), PROMPT, told)
        with daemon.client() as client:
            restart(client, warm=False)
        with (
            djinn.Session.attach(s.id, address=daemon.address) as again,
            pytest.raises(errors.AdapterNotFound, match="its files have changed"),
        ):
            again.generate([7], max_tokens=1)


def test_unknown_names_and_unserved_adapters_are_refused(daemon: Daemon, folder: Path) -> None:
    def refused(adapter: Path | str) -> str:
        with pytest.raises(errors.DjinnError) as raised:
            djinn.Session("llama", adapter=adapter, address=daemon.address)
        assert isinstance(raised.value, errors.ModelRejected | errors.NotFound)
        return raised.value.message

    assert "has no adapter 'pirate'" in refused("pirate")
    assert "no adapter_config.json" in refused(MODEL)
    assert "use_dora asks for DoRA" in refused(write_adapter(folder / "dora", MODEL, use_dora=True))
    assert "ranks from 1 to 128 are served" in refused(write_adapter(folder / "high", MODEL, rank=129))
    other = write_adapter(folder / "other", reduced_model("qwen3"))
    assert "belongs to another model" in refused(other) or "is not served" in refused(other)


def test_an_unloaded_model_takes_its_adapters_along(daemon: Daemon, adapter: Path, checkpoint: Path) -> None:
    for name in (str(MODEL), "llama"):  # forgotten, and configured
        with djinn.Session(name, adapter=adapter, address=daemon.address) as s:
            told = s.generate(PROMPT, max_tokens=NEW).token_ids
        djinn.unload(name, force=True, address=daemon.address)
        with djinn.Session(name, adapter=adapter, address=daemon.address) as s:
            assert s.generate(PROMPT, max_tokens=NEW).token_ids == told
    expect(checkpoint, PROMPT, told)


def djinnctl(daemon: Daemon, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["adapters", *arguments, "--address", daemon.address])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_djinnctl_lists_loads_and_unloads_adapters(daemon: Daemon, adapter: Path) -> None:
    for name in (str(adapter), "painter"):
        told = djinnctl(daemon, "load", "llama", name)
        assert "is loaded: rank" in told
        called = told.split(" is loaded")[0].removeprefix("llama:")
        assert (called == "painter") if name == "painter" else called.startswith(f"{adapter}@")
        rows = {row["name"]: row for row in json.loads(djinnctl(daemon, "list", "--json"))}
        assert rows[called]["is_loaded"] and rows[called]["rank"] and rows[called]["nbytes"]
        assert "unloaded" in djinnctl(daemon, "unload", "llama", called)
        rows = {row["name"]: row for row in json.loads(djinnctl(daemon, "list", "--json"))}
        assert called not in rows or not rows[called]["is_loaded"]
    with djinn.Session("llama", adapter="painter", address=daemon.address):
        result = CliRunner().invoke(main, ["adapters", "unload", "llama", "painter", "--address", daemon.address])
        assert (result.exit_code, "1 sessions use painter" in result.stderr) == (1, True)


def test_calls_without_a_session_continue_on_sessions_of_their_adapter(daemon: Daemon, folder: Path) -> None:
    with daemon.client() as client:
        first = client.generate("llama:poet", PROMPT, max_tokens=NEW)
        expect(merged(folder / "merged-poet-2", MODEL, folder / "configured"), PROMPT, first.token_ids)
        plain = client.generate("llama", PROMPT, max_tokens=NEW)
        assert plain.token_ids != first.token_ids and plain.session != first.session
        again = client.generate("llama:poet", [*PROMPT, *first.token_ids, 7], max_tokens=1)
        assert again.session == first.session and again.usage.computed_tokens <= 2
        with pytest.raises(errors.AdapterNotFound, match="no adapter 'pirate'"):
            client.generate("llama:pirate", PROMPT, max_tokens=1)


def test_http_serves_a_model_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    poet = write_adapter(folder / "tiny-poet", TINY, 2, rank=8)
    with DaemonStarter() as start:
        daemon = start({"models": {"tiny": {"path": str(TINY), "adapters": {"poet": str(poet)}}}})
        with Gateway(tmp_path, daemon.address) as gateway, daemon.client() as client:
            body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
            told = {
                name: gateway.post("/v1/completions", body | {"model": name}).json for name in ("tiny", "tiny:poet")
            }
            texts = {name: answer["choices"][0]["text"] for name, answer in told.items()}
            assert texts["tiny:poet"] == client.generate("tiny:poet", body["prompt"], max_tokens=8).text
            assert texts["tiny:poet"] != texts["tiny"]
            listed = {each["id"]: each.get("parent") for each in gateway.get("/v1/models").json["data"]}
            assert listed["tiny:poet"] == "tiny" and listed["tiny"] is None
            missing = gateway.post("/v1/completions", body | {"model": "tiny:pirate"})
            assert (missing.status, missing.json["error"]["code"]) == (404, "adapter_not_found")
