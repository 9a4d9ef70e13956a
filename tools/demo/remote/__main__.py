"""The server's part: two machines, a certificate, a daemon with a gateway, a token; and a clean end."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import djinn_client as djinn
from tools import two_machines
from tools.demo import page, scenes
from tools.demo.model import CACHE, DemoModel, demo_model, shipped, toy
from tools.private_daemon import DaemonFailed, PrivateDaemon, end_with_parent
from tools.two_machines import SERVER, Client, NamespacesRefused

MEMORY = "3GiB"  # for the small model twice: from its folder, and from the laptop
CERTIFICATE = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=gpu -keyout tls.key -out tls.pem"
HTTP, SESSIONS = f"{SERVER}:8443", f"{SERVER}:5556"
FAILURES = (scenes.DemoFailed, DaemonFailed, NamespacesRefused, djinn.DjinnError)


def demo(folder: Path, model: DemoModel) -> None:
    page.title("Two machines, made of this one")
    with two_machines.client_machine() as laptop:
        page.note(f"`gpu` is {SERVER}, `laptop` is {two_machines.CLIENT}: two network namespaces and a cable.")
        page.title("On gpu: a certificate made on the spot, and djinnd with its gateway")
        page.code(CERTIFICATE.replace(" -days", " \\\n    -days"))
        scenes.output_of(*_certificate(folder))
        with PrivateDaemon(folder, _configuration(folder, model), options=[f"--http={HTTP}"]) as daemon:
            try:
                serve(daemon, laptop, folder / "laptop", model)
            except FAILURES:
                print(f"the daemon's last words:\n{daemon.last_words()}")
                raise
        if left := daemon.shared_memory():
            raise scenes.DemoFailed(f"left in /dev/shm: {', '.join(left)}")
    page.title("Both machines are gone, and nothing is left in shared memory")
    page.note("With two real machines: docs/guide/another-machine.md.")


def serve(daemon: PrivateDaemon, laptop: Client, home: Path, model: DemoModel) -> None:
    page.code(f'http: {{certificate: tls.pem, key: tls.key}}\nremote: {{listen: "{SESSIONS}"}}')
    page.code(f"djinnd --http {HTTP}")
    daemon.wait_until_ready()
    scenes.wait_for(SESSIONS)
    page.code(f"djinnctl token add laptop --url {SERVER}")
    line = scenes.output_of_djinnctl("token", "add", "laptop", "--url", SERVER, address=daemon.address).strip()
    page.answer(line)
    _on(laptop, home, line, model)
    daemon.stop()


def _certificate(folder: Path) -> list[str]:
    return [str(folder / word) if word.startswith("tls.") else word for word in CERTIFICATE.split()]


def _configuration(folder: Path, model: DemoModel) -> str:
    return (
        f"memory: {MEMORY}\n{model.configuration(folder)}"
        f"http: {{certificate: {folder / 'tls.pem'}, key: {folder / 'tls.key'}}}\n"
        f"remote: {{listen: '{SESSIONS}'}}\n"
    )


def _on(laptop: Client, home: Path, line: str, model: DemoModel) -> None:
    """Runs the laptop's part there. Of the server it knows the line only; it has a copy of the model."""
    checkpoint = str(model.path or shipped())
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DJINND_")}
    part = laptop.command(sys.executable, "-m", "tools.demo.remote.laptop", line, model.name, checkpoint, str(home))
    home.mkdir()
    done = subprocess.run(
        part, env=environ | {"XDG_CONFIG_HOME": str(home), "TQDM_DISABLE": "1"}, preexec_fn=end_with_parent
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise scenes.DemoFailed("the laptop's part has ended early")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.demo.remote", description="Shows sessions from another machine.")
    parser.add_argument("--toy", action="store_true", help="with djinn-tiny, which needs no package index")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the model is kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: all is put away
    try:
        if not two_machines.entered():  # there is no package index behind the cable
            two_machines.expect_allowed()
            fetched = not arguments.toy and demo_model(arguments.cache).path
            two_machines.enter("-m", "tools.demo.remote", f"--cache={arguments.cache}" if fetched else "--toy")
        model = toy() if arguments.toy else demo_model(arguments.cache)
        with tempfile.TemporaryDirectory(prefix="djinnd-demo-") as folder:
            demo(Path(folder), model)
    except KeyboardInterrupt:
        return 130
    except NamespacesRefused as error:
        print(f"the demo cannot run: {error}", file=sys.stderr)
        return two_machines.SKIPPED
    except FAILURES as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
