"""Models that a stranger wrote to harm others: their tokenizers, and other objects in place of files.

A bystander streams during every case. Each attacker gets a typed error with the limit, and the daemon has in use at the
end what it had before the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.checkpoint_files import bombs, slow_to_encode, tiny_with
from tests.support.daemon import Daemon, end_text_workers, expect_held, holdings

LIMITS = {"text_seconds": "500ms", "text_seconds_per_minute": "1h", "tokenizer_bytes": "2MiB"}


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start({"limits": LIMITS}, errors=["model_failed"])
        with daemon.client() as client:
            client.load(MODEL, kv_bytes=64 << 20)
        with Bystander(daemon.address):
            pass
        before = holdings(daemon)
        yield daemon
        expect_held(daemon, before)


@pytest.fixture
def address(target: Daemon) -> Iterator[str]:
    with Bystander(target.address):
        yield target.address
    with target.client() as client:
        for model in client.models():
            if model.name != MODEL:
                client.unload(model.name, force=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


def replaced(field: str, pattern: str) -> Callable[[dict[str, Any]], None]:
    """Puts a regular expression that backtracks into another field."""

    def change(tokenizer: dict[str, Any]) -> None:
        step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x"}
        if field == "normalizer":
            tokenizer["normalizer"] = step
        else:
            tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], *[step] * 10]}

    return change


@pytest.mark.parametrize(
    "change", [slow_to_encode, replaced("normalizer", "a*a*a*a*[^ab]")], ids=["pre-tokenizer", "normalizer"]
)
def test_a_text_that_takes_minutes_to_tokenise(address: str, folder: Path, change: Any) -> None:
    tiny_with(folder, change)
    with djinn.Session(str(folder), address=address) as s:
        with pytest.raises(djinn.TextFailed, match=r"limits\.text_seconds"):
            s.generate("a" * 3000 + "b", max_tokens=1)
        assert s.token_ids() == []
        assert s.generate("def f", max_tokens=2, ignore_eos=True).token_ids


@pytest.mark.parametrize(
    ("times", "options"),
    [((1000, 1000, 60), {}), ((20_000,), {"stop": ["never"]})],
    ids=["gigabytes", "a little too much"],
)
def test_a_decoder_that_expands_its_input_is_ended(address: str, folder: Path, times: Any, options: Any) -> None:
    tiny_with(folder, bombs(*times))
    with djinn.Session(str(folder), address=address) as s:
        with pytest.raises(djinn.TextFailed):
            s.generate([5, 6, 7], max_tokens=8, ignore_eos=True, **options)
        with pytest.raises(djinn.TextFailed):
            list(s.stream([5, 6, 7], max_tokens=8, ignore_eos=True, **options))
        assert s.token_ids() == []
        assert len(s.forward([1, 2])) == 2


def test_a_worker_that_is_killed_in_the_middle_of_a_stream(target: Daemon, address: str, folder: Path) -> None:
    tiny_with(folder, lambda tokenizer: None)
    with djinn.Session(str(folder), address=address) as s:
        stream = s.stream("x = 1", max_tokens=2000, ignore_eos=True)
        assert next(stream).token_ids
        end_text_workers(target)
        with pytest.raises(djinn.TextFailed):
            list(stream)
        assert s.token_ids() == []
        first = s.generate("def f", max_tokens=8, ignore_eos=True)
    with djinn.Session(MODEL, address=address) as s:
        assert s.generate("def f", max_tokens=8, ignore_eos=True).text == first.text


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TERABYTE = "{{ 'x' * 10 ** 12 }}"


@pytest.mark.smoke
def test_templates_that_need_minutes_or_terabytes_are_ended(address: str, folder: Path) -> None:
    """Other limits of templates are tested with their environment, in tests/unit/text/chat."""
    tiny_with(folder, lambda tokenizer: None)
    (folder / "chat_template.jinja").write_text(LOOP)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TERABYTE)
    with djinn.Session(str(folder), address=address) as s:
        with pytest.raises(djinn.TextFailed, match=r"limits\.text_seconds"):
            s.chat("hello", max_tokens=1)
        with pytest.raises(djinn.DjinnError, match="MemoryError") as raised:
            s.chat("hello", max_tokens=1, tools=[{"type": "function", "function": {"name": "f"}}])
        assert len(raised.value.message) < 3000
        assert (s.token_ids(), s.messages) == ([], [])
        assert s.generate("def f", max_tokens=2, ignore_eos=True).token_ids


@pytest.mark.parametrize("options", [{"stop": ["return", "\n\n"]}, {"logprobs": 1}])
def test_a_stranger_s_valid_model_gives_the_same_output_as_a_configured_one(
    address: str, folder: Path, options: Any
) -> None:
    tiny_with(folder, lambda tokenizer: None)
    told = []
    for model in (MODEL, str(folder)):
        with djinn.Session(model, address=address) as s:
            generated = s.generate("def größe(x):", max_tokens=24, ignore_eos=True, **options)
            pieces = list(s.stream("\n\ndef f(", max_tokens=24, ignore_eos=True, **options))
            text, tokens = "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids]
            told.append((generated.text, generated.token_ids, generated.finish_reason, text, tokens, s.token_ids()))
    assert told[0] == told[1]


def large(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(100 << 20)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        *(("tokenizer.json", spoil) for spoil in (large, pipe, endless, deep)),
        ("generation_config.json", deep),
        ("tokenizer_config.json", large),
        ("config.json", endless),
    ],
)
def test_other_objects_in_place_of_files_are_refused(address: str, folder: Path, file: str, spoil: Any) -> None:
    spoil(tiny_with(folder, lambda tokenizer: None) / file)
    with pytest.raises((djinn.ModelRejected, djinn.InvalidRequest)):
        djinn.load(str(folder), address=address)


def test_layers_that_take_too_long_to_build_are_refused(target: Daemon, folder: Path) -> None:
    target.reload({"limits": LIMITS | {"inspection_seconds": "100ms"}})
    try:
        tiny_with(folder, lambda config: config.update(num_hidden_layers=20), "config.json")
        _with_tensors(folder, 1000)
        with Bystander(target.address):
            for act in (djinn.plan, djinn.load):
                with pytest.raises(djinn.ModelRejected):
                    act(str(folder), address=target.address)
    finally:
        target.reload({"limits": LIMITS})


def _with_tensors(folder: Path, count: int) -> None:
    """Adds so many tensors that any number of layers seems valid."""
    header = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(count)}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
