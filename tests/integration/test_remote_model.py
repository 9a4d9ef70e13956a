"""A remote model gives what the same model gives in this process, token for token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)

import djinn_client as djinn
from djinn_client.remote_model.model import RemoteModel
from tests.support.daemon import THREADS, Daemon
from tests.support.models import reduced_model, tiny_model
from tests.support.parameters import long_except

torch.set_num_threads(int(THREADS))

LENGTHS = (7, 3, 12, 1, 9)
NEW = 24
PAD = 0
FAMILIES = ("llama-3.1", "mistral", "qwen3", "gpt2", "gemma-3", "mixtral", "gpt-oss", "gpt-neox")
TEXTS = ["def f(", "class Foo:\n    def", "import os, sys\n"]


def local_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def batch(side: str) -> dict[str, Tensor]:
    """Five prompts, with their padding on this side."""
    draw = torch.Generator().manual_seed(5)
    longest = max(LENGTHS)
    ids = torch.full((len(LENGTHS), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(longest - length, None) if side == "left" else slice(length)
        ids[row, place] = torch.randint(1, 512, (length,), generator=draw)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def new_of(whole: Tensor) -> Tensor:
    return whole[:, max(LENGTHS) :]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_padded_batch_equal_the_local_models(family: str, roomy_daemon: Daemon) -> None:
    """transformers computes the first token of a row that is padded on the right from its padding, and warns of that.
    Here such a row has the tokens that transformers gives with the padding on the left."""
    local = local_model(reduced_model(family))
    plain: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    left, right = batch("left"), batch("right")
    with djinn.remote(local, kv_bytes=32 << 20, address=roomy_daemon.address) as remote:
        expected = local.generate(**left, **plain)
        assert remote.generate(**left, **plain).tolist() == expected.tolist()
        found = remote.generate(**right, **plain)
        assert found[:, : max(LENGTHS)].equal(right["input_ids"])
        assert new_of(found).tolist() == new_of(expected).tolist()
        ends = [int(new_of(expected)[2, 9]), int(new_of(expected)[4, 4])]  # two rows at least end early
        ended = local.generate(**left, **plain | {"eos_token_id": ends})
        assert (new_of(ended) == PAD).any()
        assert remote.generate(**left, **plain | {"eos_token_id": ends}).tolist() == ended.tolist()


# --- djinn-tiny, by its name ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> PreTrainedModel:
    return local_model(tiny_model())


@pytest.fixture(scope="module")
def remote(roomy_daemon: Daemon) -> Iterator[RemoteModel]:
    with djinn.remote("djinn-tiny", kv_bytes=64 << 20, address=roomy_daemon.address) as opened:
        yield opened
    assert djinn.sessions(address=roomy_daemon.address) == []


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made = AutoTokenizer.from_pretrained(tiny_model(), padding_side="left")
    made.pad_token = made.eos_token
    return made


@pytest.fixture(scope="module")
def inputs(tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


class Ends:
    """A criterion of the caller: a row ends behind this token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: Tensor, scores: object, **others: object) -> Tensor:
        return ids[:, -1] == self.token


QUICK: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 8, "do_sample": True, "top_k": 1, "num_return_sequences": 2},
    {"max_new_tokens": 20, "stop_strings": ["\n", "self"]},
]
OPTIONS: list[dict[str, Any]] = [
    *QUICK,
    {"max_length": 26},
    {"max_new_tokens": 12, "repetition_penalty": 1.3, "use_cache": False},
    {"max_new_tokens": 16, "min_new_tokens": 8},
    {"max_new_tokens": 12, "stopping_criteria": [Ends(199)]},
    {"max_new_tokens": 12, "stopping_criteria": [Ends(199)], "eos_token_id": None},
]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(
    "options",
    long_except(QUICK, OPTIONS),
    ids=lambda options: "-".join(options) or "default",
)
def test_arguments_mean_what_they_mean_locally(
    options: dict[str, Any],
    remote: RemoteModel,
    local: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Tensor],
) -> None:
    given = inputs | options | ({"tokenizer": tokenizer} if "stop_strings" in options else {})
    assert remote.generate(**given).tolist() == local.generate(**given).tolist()


def test_a_generation_config_means_what_it_means_locally_and_arguments_come_before_it(
    remote: RemoteModel, local: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.3, eos_token_id=0, pad_token_id=0)
    changes: list[dict[str, Any]] = [{}, {"max_new_tokens": 5}, {"repetition_penalty": 1.0}]
    for options in changes:
        given = inputs | {"generation_config": config} | options
        assert remote.generate(**given).tolist() == local.generate(**given).tolist()
    with pytest.raises(djinn.InvalidRequest, match="num_beams"):
        remote.generate(**inputs, generation_config=GenerationConfig(num_beams=3))


def test_a_prompt_of_nothing_begins_with_the_bos_token(remote: RemoteModel, local: PreTrainedModel) -> None:
    assert remote.generate(max_new_tokens=6).tolist() == local.generate(max_new_tokens=6).tolist()


class Put:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def put(self, tokens: Tensor) -> None:
        self.given.append(tokens.tolist())

    def end(self) -> None:
        self.given.append("end")


def test_a_streamer_gets_what_it_gets_locally(
    remote: RemoteModel, local: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    there, here = Put(), Put()
    remote.generate(**inputs, max_new_tokens=6, streamer=there)
    local.generate(**inputs, max_new_tokens=6, streamer=here)
    assert there.given == here.given
    assert len(there.given) == 1 + 6 + 1


def test_logits_of_the_new_tokens_come_with_them(
    remote: RemoteModel, local: PreTrainedModel, inputs: dict[str, Tensor]
) -> None:
    wanted: dict[str, Any] = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    there, here = remote.generate(**inputs, **wanted), local.generate(**inputs, **wanted)
    assert there.sequences.equal(here.sequences)
    torch.testing.assert_close(torch.stack(there.logits), torch.stack(here.logits), rtol=0, atol=1e-4)


def test_the_seed_of_torch_repeats_a_sampled_call(remote: RemoteModel, inputs: dict[str, Tensor]) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(remote.generate(**inputs, do_sample=True, temperature=2.0, top_k=0, max_new_tokens=8).tolist())
    assert found[0] == found[1] != found[2]


def test_a_call_gives_logits_and_a_loss(remote: RemoteModel, local: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = remote(**inputs).logits
    with torch.inference_mode():
        expected = local(**inputs, position_ids=positions).logits
        loss = local(ids[1:2], labels=ids[1:2]).loss
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-4)
    assert found.shape == expected.shape and not found[~mask].any()
    (row,) = remote(**inputs, logits_to_keep=1, return_dict=False)
    torch.testing.assert_close(row, found[:, -1:], rtol=0, atol=1e-4)  # the rows may run in other steps
    torch.testing.assert_close(remote(ids[1:2], labels=ids[1:2]).loss, loss, rtol=0, atol=1e-4)
    with pytest.raises(djinn.InvalidRequest, match="labels behind padding: pad on the right"):
        remote(**inputs, labels=ids)


def test_a_pipeline_gives_what_it_gives_with_the_local_model(
    remote: RemoteModel,
    local: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    there, here = (pipeline("text-generation", model=model, tokenizer=tokenizer) for model in (remote, local))
    assert "not supported" not in caplog.text
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert there(TEXTS[0], **options) == here(TEXTS[0], **options)
    options |= {"batch_size": 3, "return_full_text": False, "stop_sequence": "\n"}
    assert there(TEXTS, **options) == here(TEXTS, **options)


def test_an_error_leaves_no_session(remote: RemoteModel, inputs: dict[str, Tensor], roomy_daemon: Daemon) -> None:
    with pytest.raises(djinn.InvalidRequest, match="num_beams"):
        remote.generate(**inputs, num_beams=3)
    with pytest.raises(djinn.InvalidRequest, match="there is room for"):
        remote.generate(**inputs, max_new_tokens=1 << 20)
    assert djinn.sessions(address=roomy_daemon.address) == []


def test_a_model_goes_to_devices_and_keeps_its_dtype(remote: RemoteModel) -> None:
    assert remote.to("cuda:0").eval() is remote
    assert (remote.device, remote.dtype, remote.name_or_path) == (torch.device("cpu"), torch.float32, "djinn-tiny")
    with pytest.raises(djinn.InvalidRequest, match=r"computes in torch.float32, not in torch.float16"):
        remote.to(dtype=torch.float16)


@pytest.mark.long
def test_the_configuration_of_a_folder_comes_from_the_daemon(roomy_daemon: Daemon) -> None:
    """A confined process has read it: no administrator has named this model."""
    folder = reduced_model("gpt2")
    with djinn.remote(str(folder), kv_bytes=64 << 20, address=roomy_daemon.address) as remote:
        assert (remote.config.model_type, remote.config.name_or_path) == ("gpt2", str(folder))
        assert type(remote).__name__ == "GPT2LMHeadModel"


def test_a_name_without_a_configuration_asks_for_one(roomy_daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(djinn.InvalidRequest, match="cannot read the configuration of djinn-tiny: give config="):
        djinn.remote("djinn-tiny", config=str(tmp_path), kv_bytes=64 << 20, address=roomy_daemon.address)


def test_weights_stay_for_the_next_program_when_a_connection_breaks(
    local: PreTrainedModel, roomy_daemon: Daemon
) -> None:
    told: list[djinn.Progress] = []
    first = djinn.remote(local, kv_bytes=32 << 20, address=roomy_daemon.address)
    assert first._handle is not None
    first._handle._connection.close()  # as when its process ends
    with djinn.remote(local, kv_bytes=32 << 20, address=roomy_daemon.address, on_progress=told.append) as second:
        assert second.name_or_path == first.name_or_path
        assert not any(progress.stage == "sharing" for progress in told)
        ids = torch.tensor([[300, 20, 101]])
        assert second.generate(ids, max_new_tokens=4).tolist() == local.generate(ids, max_new_tokens=4).tolist()
    with pytest.raises(djinn.ModelNotFound):
        second.generate(ids, max_new_tokens=4)
