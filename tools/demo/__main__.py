"""The demo from beginning to end: a daemon of its own, the scenes, a clean stop."""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from pathlib import Path

import djinn_client as djinn
from tools.demo import page, scenes
from tools.demo.model import CACHE, DemoModel, demo_model, toy
from tools.private_daemon import DaemonFailed, PrivateDaemon

MEMORY = "3GiB"  # enough for the small model; the machine keeps the rest
FAILURES = (scenes.DemoFailed, DaemonFailed, djinn.DjinnError)


def demo(folder: Path, model: DemoModel) -> None:
    page.title("Starting djinnd, on a socket of its own and with HTTP")
    http = f"127.0.0.1:{_free_port()}"
    config = f"memory: {MEMORY}\n{model.configuration(folder)}"
    with PrivateDaemon(folder, config, options=[f"--http={http}"]) as daemon:
        try:
            daemon.wait_until_ready()
            visit(model, daemon.address, http)
            daemon.stop()
        except FAILURES:
            print(f"the daemon's last words:\n{daemon.last_words()}")
            raise
    if left := daemon.shared_memory():
        raise scenes.DemoFailed(f"left in /dev/shm: {', '.join(left)}")
    page.note("djinnd has stopped; nothing is left in shared memory.")
    scenes.what_next(str(model.path or "MODEL"))


def visit(model: DemoModel, address: str, http: str) -> None:
    device = djinn.status(address=address).devices[0]
    with djinn.Session(model.name, address=address) as session:
        page.note(f"{model.name} is on {device.name}, {device.description}.")
        scenes.wait_for(http)
        scenes.over_http(model.name, http)
        scenes.in_a_session(session)
        scenes.paused(session)
        scenes.forked(session, address)
        page.note("`kept` is the conversation over HTTP: it is ready for the program's next call.")
    scenes.steered(model.name, address)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.demo", description="Shows what djinnd does.")
    parser.add_argument("--toy", action="store_true", help="with djinn-tiny, which needs no package index")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the model is kept")
    arguments = parser.parse_args()
    try:
        model = toy() if arguments.toy else demo_model(arguments.cache)
        with tempfile.TemporaryDirectory(prefix="djinnd-demo-") as folder:
            demo(Path(folder), model)
    except KeyboardInterrupt:
        return 130
    except FAILURES as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
