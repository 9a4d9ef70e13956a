"""OpenAI's own client sends the whole transcript with each turn; the daemon computes what is new, restarted or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TURNS
from tests.support.daemon import ROOT
from tests.support.gateway import Gateway

openai = pytest.importorskip("openai")

SLACK = 8  # tokens: the answer may be other tokens when it is read again as a part of the transcript


@pytest.mark.parametrize("key", [None, "ticket-1"], ids=["by its transcript", "by its key"])
def test_ten_turns_compute_only_their_new_messages(
    start_daemon: DaemonStarter, tmp_path: Path, key: str | None
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TURNS)
    daemon = start_daemon(
        {"models": {MODEL: {"path": str(ROOT / "djinnd" / "models" / MODEL), "chat_template": str(template)}}}
    )
    with (
        Gateway(tmp_path, daemon.address) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=5) as client,
    ):
        messages: list[dict[str, str]] = []
        before = page_size = 0
        for number in range(10):
            if number == 5:
                with daemon.client() as control:
                    page_size = max(model.page_size for model in control.models())
                    restart(control, warm=True)
            messages.append({"role": "user", "content": f"def f{number}(a, b):" + " # and so on" * 8})
            extra = {"prompt_cache_key": key} if key else {}
            made = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=16, temperature=0, extra_body=extra
            )
            messages.append({"role": "assistant", "content": made.choices[0].message.content})
            usage = made.usage
            computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            lost = page_size if number == 5 else 0  # full pages stay on the host
            assert computed <= usage.prompt_tokens - before + SLACK + lost, (number, usage)
            before = usage.prompt_tokens
