"""langchain-openai, litellm, instructor, llm and curl, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.conftest import MODEL

USER = [{"role": "user", "content": "Is it raining?"}]

# Warnings about these libraries' own code, such as Pydantic models of older versions, are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


class Verdict(BaseModel):
    """A verdict. Closed, as djinn-tiny would add properties without end."""

    model_config = ConfigDict(extra="forbid")

    answer: Literal["yes", "no"]


def test_langchain(gateway):
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model=MODEL, base_url=f"{gateway.url}/v1", api_key="unused", max_tokens=500, temperature=0, max_retries=0
    )
    whole = model.invoke("def f(")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream("def f(")) == whole.content
    assert model.with_structured_output(Verdict).invoke("def f(").answer in ("yes", "no")
    called = model.bind_tools([Verdict], tool_choice="Verdict").invoke("def f(")
    assert called.tool_calls[0]["name"] == "Verdict"


def test_litellm(gateway, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import fetches a table of prices otherwise
    import litellm

    for model in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
        options: Any = {"model": model, "api_base": f"{gateway.url}/v1", "api_key": "unused", "messages": USER}
        whole = litellm.completion(max_tokens=4, temperature=0, **options)
        pieces = litellm.completion(max_tokens=4, temperature=0, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
        long = [{"role": "user", "content": "x = 1\n" * 3000}]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**options | {"messages": long})


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(gateway, mode):
    import instructor
    import openai

    raw = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)
    client = instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))
    options: Any = {"messages": USER, "max_tokens": 500, "temperature": 0, "max_retries": 0}
    if mode == "JSON":  # which asks for any JSON object, and hopes: djinn-tiny cannot read
        with pytest.raises(Exception, match=r"validation error|incomplete|JSON"):
            client.chat.completions.create(model=MODEL, response_model=Verdict, **options)
    else:
        assert client.chat.completions.create(model=MODEL, response_model=Verdict, **options).answer in ("yes", "no")


def test_llm(gateway, tmp_path: Path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "tiny", "model_name": MODEL, "api_base": f"{gateway.url}/v1"}])
    )
    environ = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "unused"}
    command = [sys.executable, "-m", "llm", "-m", "tiny", "-o", "max_tokens", "4", "def f("]
    for options in ([], ["--no-stream"]):
        told = subprocess.run([*command, *options], env=environ, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0 and told.stdout.strip(), told.stderr


def test_curl(gateway):
    body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 4, "stream": True})
    command = ["curl", "-sN", f"{gateway.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert told.endswith("data: [DONE]\n\n")
    chunked = ["-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue", "-d", body.replace("true", "false")]
    command = ["curl", "-s", f"{gateway.url}/v1/chat/completions", *chunked]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(told)["choices"][0]["message"]["role"] == "assistant"
