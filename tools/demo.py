"""`make demo`: a daemon of its own, six sessions of three classes at once, what djinnctl says meanwhile, a clean stop.

It has what everybody has: djinn_client, and the commands `djinnd` and `djinnctl`. On a terminal the texts grow side by
side; into a file or a pipe they come as lines.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple, Self

from rich.ansi import AnsiDecoder
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

import djinn_client as djinn
from djinn_client.protocol import Class
from tools.private_daemon import DaemonFailed, PrivateDaemon

MODEL = "djinn-tiny"
TURNS = 2  # the second goes on from where the session is
TOKENS = 128  # a turn
CONFIG = "memory: 2GiB\n"  # enough for the small model, and the machine keeps the rest

console = Console(highlight=False)


class Script(NamedTuple):
    """What one session of the demo does."""

    name: str
    priority: Class
    prompt: str
    temperature: float = 0.0


SCRIPTS = (
    Script("interactive 1", "interactive", "def fibonacci(n):\n"),
    Script("interactive 2", "interactive", "class Stack:\n    def __init__(self", 0.7),
    Script("agent 1", "agent", "import os\nimport sys\n\ndef main(", 0.7),
    Script("agent 2", "agent", "def read_file(path):\n", 0.7),
    Script("batch 1", "batch", "class TestCase(unittest.TestCase):\n", 0.7),
    Script("batch 2", "batch", "try:\n    import ", 0.7),
)


class DemoFailed(Exception):
    pass


FAILURES = (DemoFailed, DaemonFailed, djinn.DjinnError, ExceptionGroup)


class Show(ABC):
    """Where the sessions' texts go."""

    @abstractmethod
    def add(self, script: Script, text: str) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Panels(Show):
    """One panel a session, side by side, on a terminal."""

    HEIGHT = 9  # lines of text

    def __init__(self) -> None:
        self._texts = {script.name: script.prompt for script in SCRIPTS}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=12)

    def add(self, script: Script, text: str) -> None:
        self._texts[script.name] += text

    def _render(self) -> Columns:
        width = max(30, console.width // 3 - 1)
        return Columns([self._panel(name, text, width) for name, text in self._texts.items()])

    def _panel(self, name: str, text: str, width: int) -> Panel:
        lines = [line[i : i + width - 4] for line in text.split("\n") for i in range(0, max(1, len(line)), width - 4)]
        code = Syntax("\n".join(lines[-self.HEIGHT :]), "python", theme="ansi_dark", background_color="default")
        return Panel(code, title=name, width=width, height=self.HEIGHT + 2)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)


class Lines(Show):
    """Each line with its session's name, when it is whole."""

    def __init__(self) -> None:
        self._rest = {script.name: script.prompt for script in SCRIPTS}

    def add(self, script: Script, text: str) -> None:
        *whole, self._rest[script.name] = (self._rest[script.name] + text).split("\n")
        for line in whole:
            self._print(script.name, line)

    def _print(self, name: str, line: str) -> None:
        console.print(f"{name:<14}| {line}", markup=False, soft_wrap=True)

    def __exit__(self, *error: object) -> None:
        for name, line in self._rest.items():
            self._print(name, line)


class Result(NamedTuple):
    tokens: int
    first_token_s: float
    seconds: float


async def talk(script: Script, address: str, show: Show, started: asyncio.Event, go_home: asyncio.Event) -> Result:
    """One session: a prompt, then on from there. It stays open until everybody may go home."""
    async with djinn.AsyncSession(MODEL, priority=script.priority, address=address) as session:
        results: list[djinn.Generated] = []
        for prompt in [script.prompt] + [None] * (TURNS - 1):
            stream = session.stream(prompt, max_tokens=TOKENS, temperature=script.temperature, seed=7, ignore_eos=True)
            async for piece in stream:
                show.add(script, piece.text)
                started.set()
            results.append(stream.result)
        await go_home.wait()
    return Result(
        tokens=sum(result.usage.generated_tokens for result in results),
        first_token_s=results[0].timings.first_token,
        seconds=sum(result.timings.total for result in results),
    )


async def djinnctl(*arguments: str, address: str) -> str:
    """What the command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "djinnctl", *arguments),
        env=os.environ | {"DJINND_ADDRESS": address, "COLUMNS": str(console.width)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise DemoFailed(f"djinnctl {' '.join(arguments)} ended with exit code {process.returncode}")
    return output.decode()


async def everybody(address: str, show: Show) -> list[Result]:
    """All sessions at once, and djinnctl when each of them is generating."""
    started = [asyncio.Event() for _ in SCRIPTS]
    go_home = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        talks = [
            group.create_task(talk(script, address, show, event, go_home))
            for script, event in zip(SCRIPTS, started, strict=True)
        ]
        for event in started:
            await event.wait()
        commands = ("status", "ps")
        outputs = await asyncio.gather(*(djinnctl(command, address=address) for command in commands))
        for command, output in zip(commands, outputs, strict=True):
            console.print(Panel(Group(*AnsiDecoder().decode(output)), title=f"meanwhile: djinnctl {command}"))
        go_home.set()
    return [task.result() for task in talks]


def summary(results: list[Result]) -> Table:
    table = Table("session", "class", "tokens", "first token", "tokens a second", title=f"{len(results)} sessions")
    for script, result in zip(SCRIPTS, results, strict=True):
        rate = f"{result.tokens / result.seconds:,.0f}"
        table.add_row(script.name, script.priority, str(result.tokens), f"{result.first_token_s * 1e3:.0f} ms", rate)
    return table


def say(step: int, text: str) -> None:
    console.print(f"[bold cyan]{step}/4[/] {text}")


def demo(folder: Path) -> None:
    say(1, "starting djinnd on a socket of its own")
    with PrivateDaemon(folder, CONFIG) as daemon:
        try:
            daemon.wait_until_ready(lambda status: console.print(f"    {status}", markup=False, style="dim"))
            visit(daemon.address)
            say(4, "stopping djinnd")
            daemon.stop()
        except FAILURES:
            console.print(f"the daemon's last words:\n{daemon.last_words()}", markup=False, style="dim", soft_wrap=True)
            raise
    if left := daemon.shared_memory():
        raise DemoFailed(f"left in /dev/shm: {', '.join(left)}")
    console.print("    stopped; nothing is left in shared memory")


def visit(address: str) -> None:
    device = djinn.status(address=address).devices[0]
    console.print(f"    ready on {device.name}: {device.description}", markup=False)
    say(2, f"loading {MODEL}, which is shipped with djinnd")
    model = djinn.load(MODEL, address=address)
    console.print(f"    {model.parameters:,} parameters in {model.blocks} blocks")
    say(3, f"{len(SCRIPTS)} sessions at once, of three classes")
    with Panels() if console.is_terminal else Lines() as show:
        results = asyncio.run(everybody(address, show))
    console.print(summary(results))


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="djinnd-demo-") as folder:
            demo(Path(folder))
    except KeyboardInterrupt:
        return 130
    except FAILURES as error:
        reasons = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        for reason in reasons:
            console.print(f"the demo failed: {reason}", markup=False, style="bold red", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
