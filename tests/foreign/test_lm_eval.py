"""lm-evaluation-harness, unchanged: log likelihoods and outputs over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL
from tests.support.warm_forks import ROOT

lm_eval = pytest.importorskip("lm_eval")

# Warnings about the harness's own code are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

FOLDER = Path(ROOT, "djinnd", "models", MODEL)
CASES = [("def add(a, b):", " return a"), ("class A", ":\n    def"), ("import", " os")]


def _requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def completions(gateway: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{gateway.url}/v1/completions", model=MODEL, tokenizer=str(FOLDER), batch_size=2, max_retries=1
    )


def test_log_likelihoods_are_the_native_client_s(completions, gateway):
    told = completions.loglikelihood(_requests("loglikelihood", CASES))
    for (context, answer), (likelihood, is_greedy) in zip(CASES, told, strict=True):
        with djinn.Session(MODEL, address=gateway.daemon) as session:
            prompt = completions.tok_encode(context)
            whole = completions.tok_encode(context + answer)
            scored = session.generate(whole, max_tokens=0, prompt_logprobs=1).prompt_logprobs
        entries = list(scored)[len(prompt) :]
        assert likelihood == pytest.approx(sum(entry.token for entry in entries), abs=1e-3)
        assert is_greedy == all(entry.token == max(entry.top.values()) for entry in entries)


def test_outputs_end_where_they_are_told(completions):
    wanted = [("def f(", {"until": ["\n"], "max_gen_toks": 16}), ("class A", {"until": ["\n"], "max_gen_toks": 16})]
    told = completions.generate_until(_requests("generate_until", wanted))
    assert len(told) == 2 and all("\n" not in text for text in told)


def test_a_chat(gateway):
    from lm_eval.models.openai_completions import LocalChatCompletion

    chat: Any = LocalChatCompletion(
        base_url=f"{gateway.url}/v1/chat/completions", model=MODEL, tokenizer_backend=None, max_retries=1
    )
    messages = chat.apply_chat_template([{"role": "user", "content": "hi"}])
    told = chat.generate_until(_requests("generate_until", [(messages, {"until": ["\n"], "max_gen_toks": 8})]))
    assert len(told) == 1
