"""The snippets of README and docs run, in the order of their page, on a daemon that has djinn-tiny.

Snippets name models and blocks that a reader is likely to have; here they are djinn-tiny, with its eight blocks. A
comment `<!-- test: CODE -->` before a snippet makes what the snippet takes for granted. `<!-- compiled only: WHY -->`
marks a snippet that runs elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import djinn_client as djinn
from djinnctl.cli import main as djinnctl
from djinnd.__main__ import main as djinnd
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TOOLS
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway
from tests.support.parameters import long_except
from tests.support.snippets import ROOT, snippets
from tools.reference_pages import PAGES as PAGES_MADE
from tools.reference_pages import filled, metric_table

PAGES = ["README.md", "client/README.md", *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/*/*.md")))]
WITH_SNIPPETS = [page for page in PAGES if "```python" in (ROOT / page).read_text()]
QUICK_PAGES = ("README.md", "client/README.md", "docs/guide/first-steps.md", "docs/guide/conversations.md")
COMMAND = re.compile(r"^(?:\$ )?(?:/opt/djinnd/bin/)?((?:djinnctl|djinnd) .*?)(?: *[|>#&].*)?$", re.M)


@pytest.fixture(scope="module")
def reader() -> Iterator[Daemon]:
    """A daemon with a chat template for djinn-tiny."""
    with DaemonStarter() as start:
        running = start({"metrics": str(start.folder() / "metrics")})
        with running.client() as client:
            client.load(MODEL, chat_template=TOOLS)
        yield running


def brief(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call with at most 16 tokens of output: without a bound, djinn-tiny fills its context."""
    return lambda *args, **options: call(*args, **options | {"max_tokens": min(options.get("max_tokens", 16), 16)})


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", long_except(QUICK_PAGES, WITH_SNIPPETS))
def test_the_snippets_of_a_page_run(page: str, reader: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINND_ADDRESS", reader.address)
    monkeypatch.chdir(tmp_path)
    for owner, name in itertools.product((djinn, djinn.Session, djinn.Client), ("generate", "chat", "chat_stream")):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, brief(getattr(owner, name)))
    names: dict[str, object] = {"djinn": djinn}
    for snippet in snippets(page):
        compiled = compile(snippet.code, page, "exec")
        if snippet.elsewhere is None:
            exec(compiled, names)
    names.clear()
    gc.collect()  # snippets leave sessions open: the warnings about these come here


def test_the_page_of_metrics_has_all_that_are_served(reader: Daemon, tmp_path: Path) -> None:
    with Gateway(tmp_path, reader.address) as gateway:
        gateway.post("/v1/completions", {"model": MODEL, "prompt": "def f(", "max_tokens": 2})
        served = gateway.get("/metrics").content.decode()
    with closing(socket.socket(socket.AF_UNIX)) as daemon, daemon.makefile("rwb") as stream:
        daemon.connect(str(yaml.safe_load((reader.folder / "djinnd.yaml").read_text())["metrics"]))
        stream.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        stream.flush()
        served += stream.read().decode().partition("\r\n\r\n")[2]
    told = tmp_path / "metrics.txt"
    told.write_text(served)
    page = PAGES_MADE["metrics"].read_text()
    assert page == filled(page, "metrics", metric_table(served)), f"run `python -m tools.reference_pages {told}`"


def commands(page: str) -> list[str]:
    """Lines of listings that begin with one of our commands, as far as a pipe or a comment."""
    listings = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [line for listing in listings for line in COMMAND.findall(listing)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_exist_with_their_options(page: str) -> None:
    for line in commands(page):
        name, *arguments = shlex.split(line)
        command: click.Command = djinnctl if name == "djinnctl" else djinnd
        context = command.make_context(name, list(arguments), resilient_parsing=False)
        while isinstance(command, click.Group):
            _, found, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
            assert found is not None, line
            command = found
            context = command.make_context(command.name, arguments, parent=context)
