from __future__ import annotations

import pytest

from djinn_client.errors import InvalidRequest, NoTokenizer, PromptTooLong, TokenOutOfRange
from djinn_client.protocol import Forward, Generate, LoadModel, ModelInfo, PlanModel, Sampling
from djinn_client.protocol.fields.chat import ChatInput
from djinn_client.protocol.fields.placing import Placing
from djinnd.server.admission import admission

MODEL = ModelInfo(name="m", path="/m", vocab=100, max_context=50)


def generate(**fields):
    return Generate(id=1, session="s", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "x", "stop": ["y"] * admission.MAX_STOPS},
        {"token_ids": [1], "stop_token_ids": [99]},
        {"max_tokens": 1, "logprobs": 20},
        {"max_tokens": admission.MAX_NEW_TOKENS, "logprobs": 0},
        {"expected_tokens": 1 << 40, "deadline_s": 86400.0},
        {"between_tokens_s": 0.0, "first_token_s": 0.001},
    ],
)
def test_valid_requests_pass(fields):
    admission.check_generate(generate(**fields), MODEL, lacking="")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": "x", "token_ids": [1]}, "not as two of them"),
        ({"chat": ChatInput(b"[]"), "text": "x"}, "not as two of them"),
        ({"chat": ChatInput(b"[]"), "skip_special_tokens": False}, "are for text prompts"),
        ({"chat": ChatInput(b"[]"), "prefix_space": True}, "are for text prompts"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"expected_tokens": -1}, "expected_tokens is -1; it must be 0 .not known. or a count"),
        ({"deadline_s": -0.5}, "deadline_s is -0.5; it must be from 0"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"deadline_s": float("inf")}, "deadline_s is inf"),
        ({"deadline_s": 86401.0}, "deadline_s is 86401; it must be from 0 .none. to 86400 seconds, a day"),
        ({"between_tokens_s": -0.1}, "between_tokens_s is -0.1; it must be 0 .no target., or from 0.001 to 86400"),
        ({"first_token_s": float("nan")}, "first_token_s is nan"),
        ({"stop": [""]}, "empty"),
        ({"stop": ["a"] * 17}, "17 stop strings are too many"),
        ({"stop": ["a" * 257]}, "257 characters"),
        ({"stop_token_ids": [1] * 257}, "257 stop tokens"),
        ({"stop_token_ids": [100]}, "token 100"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p is 0"),
        ({"sampling": Sampling(frequency_penalty=101.0)}, "frequency_penalty is 101"),
        ({"sampling": Sampling(logit_bias={3: 100.5})}, "the logit_bias of token 3 is 100.5; it must be from -100 to"),
        ({"sampling": Sampling(logit_bias={3: float("nan")})}, "the logit_bias of token 3 is nan"),
        ({"sampling": Sampling(logit_bias={100: 1.0})}, "token 100"),
        ({"sampling": Sampling(min_tokens=-1)}, "min_tokens is -1"),
    ],
)
def test_invalid_requests_are_refused(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        admission.check_generate(generate(**fields), MODEL, lacking="")


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 30}, 30),
        ({"max_tokens": None}, 30),
        ({}, 30),
        ({"max_tokens": 40, "resume": True}, 30),
        ({"sampling": Sampling(min_tokens=30)}, 30),
    ],
)
def test_how_many_tokens_a_call_may_generate(fields, most):
    assert admission.most_tokens(generate(**fields), 5, 15, MODEL) == most


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 31}, "max_tokens is 31, and there is room for 30: m takes 50 tokens, the session has 15"),
        ({"max_tokens": 4, "sampling": Sampling(min_tokens=5)}, "min_tokens is 5; it must be at most max_tokens"),
        ({"sampling": Sampling(min_tokens=31)}, "min_tokens is 31; it must be at most max_tokens, which is 30 here"),
    ],
)
def test_tokens_that_there_is_no_room_for(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        admission.most_tokens(generate(**fields), 5, 15, MODEL)


def test_max_tokens_0_without_a_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="only computes a prompt, and there is none"):
        admission.most_tokens(generate(max_tokens=0), 0, 15, MODEL)
    assert admission.most_tokens(generate(max_tokens=0, capture=["logits"]), 0, 15, MODEL) == 0


def test_too_many_bytes_of_prompt_logprobs_are_refused():
    most = admission.MAX_PROMPT_LOGPROBS_BYTES // 164
    admission.check_scored(20, most, may_stop=False)
    with pytest.raises(InvalidRequest, match=f"at most {most:,} tokens a call"):
        admission.check_scored(20, most + 1, may_stop=False)
    with pytest.raises(InvalidRequest, match="the session has breakpoints"):
        admission.check_scored(0, 1, may_stop=True)


@pytest.mark.parametrize("fields", [{"text": "x"}, {"token_ids": [1], "stop": ["y"]}])
def test_text_needs_a_tokenizer(fields):
    with pytest.raises(NoTokenizer, match=r"m takes no text, as it has no tokenizer\.json"):
        admission.check_generate(generate(**fields), MODEL, lacking="it has no tokenizer.json")


def test_an_empty_session_needs_a_prompt():
    with pytest.raises(InvalidRequest, match="empty"):
        admission.check_prompt([], 0, MODEL, room=1)
    admission.check_prompt([], 1, MODEL, room=1)


@pytest.mark.parametrize(("session", "prompt", "room"), [(0, 49, 1), (40, 9, 1), (0, 50, 0), (49, 1, 0), (49, 0, 1)])
def test_a_prompt_that_just_fits(session, prompt, room):
    admission.check_prompt([1] * prompt, session, MODEL, room)


@pytest.mark.parametrize(("session", "prompt", "room"), [(0, 50, 1), (40, 10, 1), (0, 51, 0), (50, 1, 0), (50, 0, 1)])
def test_a_prompt_that_is_one_token_too_long_is_refused_with_figures(session, prompt, room):
    with pytest.raises(PromptTooLong) as caught:
        admission.check_prompt([1] * prompt, session, MODEL, room)
    assert caught.value.data == {"session_tokens": session, "prompt_tokens": prompt, "max_context": 50}


def test_a_token_of_the_model_s_own_tokenizer_beyond_its_vocabulary():
    admission.check_prompt([0, 99], 0, MODEL, room=1, is_text=True)
    with pytest.raises(
        TokenOutOfRange, match="tokenizer of m makes token 300 of this text, but m has 100 tokens"
    ) as told:
        admission.check_prompt([0, 300], 0, MODEL, room=1, is_text=True)
    assert told.value.data == {"token": 300, "vocab": 100}


def test_token_ids_beyond_the_vocabulary():
    admission.check_prompt([0, 99], 0, MODEL, room=1)
    with pytest.raises(
        TokenOutOfRange, match="token 100 at position 1 is out of range: m has 100 tokens, 0 to 99"
    ) as caught:
        admission.check_prompt([5, 100, 3], 0, MODEL, room=1)
    assert caught.value.data == {"token": 100, "vocab": 100}


def test_forward():
    admission.check_forward(Forward(id=1, session="s", token_ids=[1] * 50), 0, MODEL)
    with pytest.raises(InvalidRequest, match="at least one token"):
        admission.check_forward(Forward(id=1, session="s", token_ids=[]), 5, MODEL)
    with pytest.raises(PromptTooLong):
        admission.check_forward(Forward(id=1, session="s", token_ids=[1] * 51), 0, MODEL)


def test_logits_are_bounded():
    wide = ModelInfo(name="w", path="/w", vocab=128_256, max_context=1 << 20)
    most = (1 << 30) // (128_256 * 4)
    admission.check_forward(Forward(id=1, session="s", token_ids=[1] * most), 0, wide)
    with pytest.raises(InvalidRequest, match=f"at most {most:,} tokens a call"):
        admission.check_forward(Forward(id=1, session="s", token_ids=[1] * (most + 1)), 0, wide)


def test_truncate():
    admission.check_truncate(0, 5)
    admission.check_truncate(5, 5)
    for length in (-1, 6):
        with pytest.raises(InvalidRequest, match="5 tokens"):
            admission.check_truncate(length, 5)


def test_loading_and_planning():
    admission.check_load(LoadModel(id=1, model="m", kv_bytes=1, placing=Placing(resident=0.5)))
    admission.check_plan(PlanModel(id=1, model="m", memory_bytes=1))
    for fields in ({"kv_bytes": -1}, {"placing": Placing(resident=1.5)}, {"placing": Placing(slots=-1)}):
        with pytest.raises(InvalidRequest):
            admission.check_load(LoadModel(id=1, model="m", **fields))
        with pytest.raises(InvalidRequest):
            admission.check_plan(PlanModel(id=1, model="m", **fields))
    admission.check_load(LoadModel(id=1, model="m", host_kv_bytes=0, disk_kv_bytes=1))
    for name in ("host_kv_bytes", "disk_kv_bytes"):
        with pytest.raises(InvalidRequest, match=f"{name} is -1"):
            admission.check_load(LoadModel(id=1, model="m", **{name: -1}))
    with pytest.raises(InvalidRequest, match="memory_bytes is -1"):
        admission.check_plan(PlanModel(id=1, model="m", memory_bytes=-1))


def test_a_budget_of_less_than_a_byte_is_refused():
    admission.check_budget(1)
    for wrong in (0, -1):
        with pytest.raises(InvalidRequest, match="1 byte or more"):
            admission.check_budget(wrong)
