"""Each addition of CONTRIBUTING is made to a copy of the sources, works there, and changes no more files than
CONTRIBUTING says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import clean_environ, warm_python
from tests.support.warm_forks import ROOT

PACKAGES = ("djinnd", "djinn_client", "tools/djinnctl")


class Copy:
    """A copy of the product's sources."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed: set[str] = set()
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=self._ignored)

    def _ignored(self, folder: str, names: list[str]) -> set[str]:
        weights = {"models"} if Path(folder) == ROOT / "djinnd" else set()
        return {"__pycache__", *weights}

    def add(self, file: str, text: str, *, before: str = "") -> None:
        """Inserts the text in front of `before`, which the file has once; without it, at the end or in a new file."""
        path = self.folder / file
        content = path.read_text() if path.exists() else ""
        if before:
            assert content.count(before) == 1, (file, before)
        path.write_text(content.replace(before, text + before) if before else content + text)
        self.changed.add(file)

    def run(self, script: str) -> str:
        """Runs a script on the copy. → its output."""
        (self.folder / "script.py").write_text("import sys\nsys.path.insert(1, sys.path[0] + '/tools')\n" + script)
        told = subprocess.run(
            [warm_python(), str(self.folder / "script.py")], env=clean_environ(), capture_output=True, text=True
        )
        assert told.returncode == 0, told.stderr
        return told.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_message_from_the_client_to_the_engine_and_back_changes_four_files(copy: Copy) -> None:
    copy.add(
        "djinn_client/protocol/requests.py",
        '\n\nclass Greet(Request, tag="greet"):\n    """Answered by Done."""\n\n    name: Name\n',
    )
    copy.add(
        "djinnd/messages/figures.py",
        '\n\nclass Greet(EngineCall["Greeted"], tag="greet"):\n    name: str\n\n\n'
        'class Greeted(CallAnswer, tag="greeted"):\n    greeting: str\n',
    )
    copy.add(
        "djinnd/engine/engine.py",
        "            messages.Greet: lambda m: self._channel.send(messages.Greeted(m.request, f'hello {m.name}')),\n",
        before="            messages.Inquire: ",
    )
    copy.add(
        "djinnd/server/requests/daemon.py",
        "    @handles(protocol.Greet)\n"
        "    async def greet(self, call: ClientCall, request: protocol.Greet) -> None:\n"
        "        from djinnd.messages import Greet\n\n"
        "        greeted = await (await self._supervisor.engine()).call(Greet, name=request.name)\n"
        "        print(greeted.greeting)\n\n",
        before="    @handles(protocol.GetQuotas)",
    )
    assert copy.run(GREET).splitlines() == ["hello reader"]
    assert len(copy.changed) <= 4


GREET = """
import asyncio, socket, threading
from types import SimpleNamespace
from djinn_client.protocol import Greet, decode_request, encode
from djinnd import messages
from djinnd.device.cpu import CpuDevice
from djinnd.engine.engine import Engine
from djinnd.engine.io.channel import ServerChannel
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.requests.daemon import DaemonRequests
from djinnd.server.wire.request_handler import handlers_of

async def main(ours):
    engine = EngineClient(ours, SimpleNamespace(), lambda suspects: None)

    async def ready():
        await engine.ready
        return engine

    part = DaemonRequests(None, None, None, SimpleNamespace(engine=ready), None, None, None, None)
    request = decode_request(encode(Greet(id=1, name="reader"))[8:])
    handler = {handling.kind: handler for handling, handler in handlers_of(part)}[type(request)]
    assert await handler(SimpleNamespace(id=1), request) is None, "Handlers answers with Done"
    engine.send(messages.Shutdown())
    await engine.over

ours, theirs = socket.socketpair()
engine = threading.Thread(target=Engine(ServerChannel(theirs.detach()), CpuDevice(1 << 30), 64, 32).serve)
engine.start()
asyncio.run(main(ours))
engine.join()
"""


def test_a_verb_of_djinnctl_changes_two_files(copy: Copy) -> None:
    copy.add(
        "tools/djinnctl/commands/daemon.py",
        '\n\n@command()\ndef greet(settings: Settings) -> None:\n    """Greet the reader."""\n'
        '    click.echo("hello reader")\n',
    )
    copy.add("tools/djinnctl/cli.py", "    daemon.greet,\n", before="    run.run,\n")
    assert copy.run("from djinnctl.cli import main\nmain(['greet'])") == "hello reader\n"
    assert len(copy.changed) <= 2


def test_a_family_that_goes_past_the_attention_interface_changes_two_files(copy: Copy) -> None:
    copy.add("djinnd/model/families/opt.py", "def install() -> None:\n    print('attention installed')\n")
    copy.add(
        "djinnd/model/families/__init__.py", "from djinnd.model.families import opt\n\n", before="# Families that need"
    )
    copy.add("djinnd/model/families/__init__.py", '\nPATCHED["opt"] = opt.install\n')
    script = (
        "import torch\nfrom transformers import OPTConfig\nfrom djinnd.model.family.skeleton import build\n"
        "build(OPTConfig(hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1), torch.float32)\n"
    )
    assert copy.run(script) == "attention installed\n"
    assert len(copy.changed) <= 2


def test_a_scheduling_class_changes_one_file(copy: Copy) -> None:
    copy.add("djinn_client/protocol/fields/scheduling.py", '"standby", ', before='"batch"]')
    assert copy.run(STANDBY) == "standby batch\n"
    assert len(copy.changed) <= 2


STANDBY = """
from djinn_client.protocol import SetPriority, decode_request, encode
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.scheduler import Scheduler

scheduler = Scheduler(max_batch_tokens=32, max_rows=8)
scheduler.add_model("m", KvManager(65, 4, 1 << 20, 64), 64, num_blocks=2)
for number, name in enumerate(["batch", "standby"]):
    message = decode_request(encode(SetPriority(id=1, session=name, priority=name))[8:])
    scheduler.open(Session(name, "m", 1000, "interactive", tokens=[]))
    scheduler.set_class(name, message.priority)
    scheduler.submit(name, Request(number, 0, 32, 1), [7] * 32)
served = []
while (batch := scheduler.next_batch()) is not None:
    served += [row.session.id for row in batch.rows]
    scheduler.complete(batch, [5] * sum(row.samples for row in batch.rows))
print(*served)
"""
