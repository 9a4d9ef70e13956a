"""Runs djinn-tiny on a daemon of its own, with a tracer in each process, and prints a value's walk."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

import djinn_client as djinn
from djinnd.kvcache.prefixes import chain, root
from tools.private_daemon import DaemonFailed, PrivateDaemon
from tools.walk import tracer
from tools.walk.route import Event, Route, route
from tools.walk.tracer import Value

CONFIG = f"""
device: cpu
memory: 1GiB
models: {{djinn-tiny: {{path: {tracer.ROOT}/djinnd/models/djinn-tiny}}}}
"""
CONTEXT = 2048 - 256  # tokens of a session that fills places
PROMPT = list(range(1201, 1999, 7))[:12]


def numbers(name: str, values: list[int]) -> Value:
    packed = b"".join(msgspec.msgpack.encode(value) for value in values)
    return Value(name, values, [packed, array("i", values).tobytes(), array("q", values).tobytes()])


@contextmanager
def traced_daemon(folder: Path) -> Iterator[str]:
    """→ the address of a daemon; tracers are in its processes and in this one, switched off."""
    tracer.switch(folder, 0)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"from tools.walk import tracer\ntracer.install({str(folder)!r})\n")
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(tracer.ROOT), before])
    try:
        with PrivateDaemon(folder, CONFIG) as daemon:
            try:
                daemon.wait_until_ready()
            except DaemonFailed as error:
                raise DaemonFailed(f"{error}\n{daemon.last_words()}") from error
            tracer.install(str(folder))
            yield daemon.address
    finally:
        sys.setprofile(None)
        os.environ["PYTHONPATH"] = before


def events(folder: Path) -> list[Event]:
    lines = (folder / tracer.EVENTS).read_text().splitlines()
    return sorted(Event(*msgspec.json.decode(line)) for line in lines)


def prompt_walk(folder: Path) -> Route:
    """A prompt's token ids to the sampled token, and the token back."""
    with traced_daemon(folder) as address, djinn.Session("djinn-tiny", address=address) as earlier:
        token = earlier.generate(PROMPT, max_tokens=1, temperature=0).token_ids[0]
        # `earlier` stays open: the engine names the pages of a session that closes, and its pages hold the same prompt.
        with djinn.Session("djinn-tiny", address=address) as session:
            tracer.switch_on(folder, 1, [numbers("prompt", PROMPT), numbers("token", [token])])
            session.generate(PROMPT, max_tokens=1, temperature=0)
            tracer.switch(folder, 0)
    return route(events(folder))


def page_walk(folder: Path) -> Route:
    """A session's page to the host and back. Other sessions have taken the places with small numbers before."""
    with traced_daemon(folder) as address, ExitStack() as others:
        with djinn.Session("djinn-tiny", address=address):  # the first session loads the model
            page_size = djinn.models(address=address)[0].page_size
        fillers = tracer.LEAST_PLACE // (CONTEXT // page_size) + 1
        for number in range(1, 1 + fillers):
            other = others.enter_context(djinn.Session("djinn-tiny", address=address))
            other.generate([number] * CONTEXT, max_tokens=0)
            other.pause("host")
        prompt = [*PROMPT, *range(page_size - len(PROMPT))]
        key = Value("page", [], [chain(root(os.getuid()), prompt)])
        with djinn.Session("djinn-tiny", address=address) as session:
            session.generate(prompt, max_tokens=0)
            tracer.switch_on(folder, 1, [key])
            session.pause("host")
            session.unpause()
            session.generate([PROMPT[0]], max_tokens=1)
            tracer.switch(folder, 0)
    return route(events(folder))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.walk", description=__doc__)
    parser.add_argument("walk", choices=["prompt", "page"])
    parser.add_argument("--functions", action="store_true", help="also print each function that had the value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="djinnd-walk-") as folder:
        walked = {"prompt": prompt_walk, "page": page_walk}[arguments.walk](Path(folder))
        if arguments.functions:
            for e in events(Path(folder)):
                print(e.value, e.kind, e.path, e.function)
    print(walked)


if __name__ == "__main__":
    main()
