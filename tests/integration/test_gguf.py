"""Models in GGUF files: named by the file, by a folder, and in the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon
from tests.support.gguf_files import gguf_bytes, write_as_gguf
from tests.support.models import tiny_model

pytest.importorskip("gguf")

PROMPT = "def parse(text):\n    "
NEW = 24


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """djinn-tiny as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-BF16.gguf"
    write_as_gguf(tiny_model(), path, "llama")
    return path


@pytest.fixture(scope="module")
def daemon(file: Path) -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start({"models": {"configured": {"path": str(file)}}}, errors=["model_failed"])


@pytest.mark.parametrize("named", ["file", "folder", "configured"])
def test_a_file_is_served_as_the_checkpoint_that_it_was_made_from(daemon: Daemon, file: Path, named: str) -> None:
    model = {"file": str(file), "folder": str(file.parent), "configured": "configured"}[named]
    with djinn.Session(model, address=daemon.address) as s:
        tokens = djinn.tokenize(model, PROMPT, address=daemon.address)
        answer = s.generate(tokens, max_tokens=NEW, ignore_eos=True)
        digits = s.generate(max_tokens=8, regex="[0-9]{4}").text
    assert answer.token_ids == reference.greedy(tiny_model(), tokens, NEW, answer.token_ids)
    with djinn.Session(str(tiny_model()), address=daemon.address) as s:
        assert s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).text == answer.text
    assert len(digits) == 4 and digits.isdigit()


def test_plan_and_models_name_the_format(daemon: Daemon, file: Path) -> None:
    with daemon.client() as client:
        assert "GGUF F32" in client.plan(str(file)).notes


def test_a_folder_with_two_models_asks_for_one(daemon: Daemon, file: Path, tmp_path: Path) -> None:
    for name in ("one-Q4_K_M.gguf", "two-Q8_0.gguf", "mmproj-two.gguf"):
        (tmp_path / name).write_bytes(gguf_bytes({"general.architecture": "llama"}))
    with daemon.client() as client, pytest.raises(djinn.ModelRejected, match=r"2 GGUF models: name .*one-Q4_K_M\.gguf"):
        client.load(str(tmp_path))


def test_formats_and_files_that_cannot_be_read_are_refused_by_name(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "small-IQ4_NL.gguf"
    write_as_gguf(tiny_model(), path, "llama", "IQ4_NL")
    with daemon.client() as client:
        with pytest.raises(djinn.ModelRejected, match="quantised as IQ4_NL, which is not served; served are F32"):
            client.plan(str(path))
        path.write_bytes(gguf_bytes({"general.architecture": "rwkv7"}))
        with pytest.raises(djinn.ModelRejected, match="GGUF files of architecture rwkv7 are not served"):
            client.load(str(path))
        path.write_bytes(path.read_bytes()[:20])
        with pytest.raises(djinn.ModelRejected, match=r"small-IQ4_NL\.gguf is damaged or cut short"):
            client.load(str(path))
        with pytest.raises(djinn.ModelNotFound, match="there is no such file"):
            client.load(str(tmp_path / "absent.gguf"))


def test_the_parts_of_a_split_model_belong_together(daemon: Daemon, tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2))
    write_as_gguf(tiny_model(), tmp_path / "whole", "llama", parts=(first, second))
    with daemon.client() as client:
        assert client.plan(str(second), memory_bytes=1 << 30).blocks == 8
        second.unlink()
        with pytest.raises(djinn.ModelRejected, match="is split, and 1 of its 2 parts are there"):
            client.load(str(first))
