"""The scenes of the demo."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import djinn_client as djinn
from djinn_client import Generated, Session
from tools.demo import page

GATEWAY_PATIENCE_S = 60.0
TOKENS = 40  # of an answer: a small machine takes some seconds for them
PAUSE_AFTER = 5  # pieces of a stream
STEERED_AT = 3  # steers after a third of the blocks; of SmolLM2's 30, blocks 10, 14 and 18 were tried
SEA = ("the ocean, waves, ships and sailors on the sea", "pirates sail the stormy sea in a ship")
TOWN = ("the office, desks, papers and clerks in the town", "people walk the quiet street in a town")


class DemoFailed(Exception):
    pass


def wait_for(gateway: str) -> None:
    """Waits for the gateway, a process of its own that is started when the daemon is ready."""
    host, _, port = gateway.partition(":")
    deadline = time.monotonic() + GATEWAY_PATIENCE_S
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise DemoFailed(f"nobody listens at {gateway}") from None
            time.sleep(0.1)


def over_http(model: str, address: str) -> None:
    page.title("Over HTTP, as programs that speak OpenAI's API do it")
    url = f"http://{address}/v1/chat/completions"
    body = f"""{{"model": "{model}", "max_tokens": {TOKENS}, "temperature": 0, "messages": [
    {{"role": "user", "content": "What is the capital of France?"}}]}}"""
    page.code(f"curl {url} -d \\\n  '{body}'")
    reply = _curl(url, body)
    page.answer(reply["choices"][0]["message"]["content"])
    usage = reply["usage"]
    page.note(f"{usage['prompt_tokens']} tokens of prompt, {usage['completion_tokens']} of answer.")


def in_a_session(session: Session) -> None:
    page.title("In a session: what was said stays in the daemon, and no prompt is sent again")
    for question in ("Name three fruits.", "Which of them is yellow?"):
        page.code(f"s.chat({question!r})")
        result = ask(session, question)
    usage = result.usage
    before = usage.session_tokens - usage.generated_tokens
    page.note(f"For the second answer {usage.computed_tokens} of {before} tokens were computed; the rest was there.")


def paused(session: Session) -> None:
    page.title("Paused in the middle of an answer: its pages leave the device")
    question = "Write two sentences about the moon."
    page.code(f"for piece in s.chat_stream({question!r}): ...")
    said = page.Said()
    with session.chat_stream(question, max_tokens=TOKENS) as stream:
        for number, piece in enumerate(stream):
            said.add(piece.text)
            if number == PAUSE_AFTER:
                said.end()
                page.code("s.pause()")
                moved = session.pause()
                size, took = f"{moved.nbytes / 2**20:.1f} MiB", f"{moved.seconds * 1e3:.0f} ms"
                pages = "1 page" if moved.pages == 1 else f"{moved.pages} pages"
                page.note(f"{pages}, {size}, went to the host in {took}.")
                page.code("s.unpause()")
                session.unpause()
    said.end()


def forked(session: Session, address: str | None = None) -> None:
    page.title("Forked: two sessions that share what they have in common")
    with session.fork() as fork:
        page.code("t = s.fork()")
        for name, one, question in (("s", session, "Say it shorter."), ("t", fork, "Say it as a pirate.")):
            page.code(f"{name}.chat({question!r})")
            ask(one, question)
        djinnctl("ps", address=address)


def steered(model: str, address: str | None = None) -> None:
    page.title("Steered: a direction is added to the activations inside the model")
    question = "Write two sentences about my day."
    point = middle_point(model, address)
    with Session(model, address=address) as plain:
        page.code(f"s.chat({question!r})")
        ask(plain, question)
    with Session(model, address=address) as steered:
        page.code(f's.steer("{point}", mean("the sea …") - mean("the town …"))')
        steered.steer(point, _mean(model, address, point, SEA) - _mean(model, address, point, TOWN))
        ask(steered, question)


def what_next(model: str) -> None:
    page.title("What next")
    page.code(
        f"""\
. .venv/bin/activate
djinnd --http 127.0.0.1:8000 &    # every OpenAI client speaks to it
djinnctl run {model}
djinnctl ps"""
    )
    page.note(
        "Any checkpoint's folder or hub id is a model: docs/guide/models.md. Chats: docs/guide/chat.md. "
        "HTTP: docs/reference/http.md. Inside the model: docs/guide/whitebox.md."
        " A service for everybody: docs/guide/service.md."
    )


def djinnctl(*arguments: str, address: str | None = None) -> None:
    """Shows the command and what it prints."""
    page.code(f"djinnctl {shlex.join(arguments)}")
    print(output_of_djinnctl(*arguments, address=address), end="", flush=True)


def output_of_djinnctl(*arguments: str, address: str | None = None) -> str:
    environ = os.environ | {"COLUMNS": str(page.COLUMNS)} | ({"DJINND_ADDRESS": address} if address else {})
    return output_of(sys.executable, "-m", "djinnctl", *arguments, environ=environ)


def output_of(*command: str, environ: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise DemoFailed(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def ask(session: Session, question: str) -> Generated:
    said = page.Said()
    with session.chat_stream(question, max_tokens=TOKENS) as stream:
        for piece in stream:
            said.add(piece.text)
    said.end()
    return stream.result


def middle_point(model: str, address: str | None = None) -> str:
    """The output of a block after a third of them."""
    (info,) = [info for info in djinn.models(address=address) if info.name == model]
    return f"blocks.{info.blocks // STEERED_AT}"


def _mean(model: str, address: str | None, point: str, texts: tuple[str, ...]) -> Any:
    """The mean activation over these texts, [width]."""
    means = []
    for text in texts:
        with djinn.Session(model, address=address) as session:
            means.append(session.capture(point).run(text)[point][0].mean(0))
    return sum(means[1:], means[0]) / len(means)


def _curl(url: str, body: str) -> Any:
    answer = output_of("curl", "-sS", url, "-d", body)
    try:
        reply = json.loads(answer)
    except ValueError as error:
        raise DemoFailed(f"{url} answered no JSON: {answer!r}") from error
    if "error" in reply:
        raise DemoFailed(f"{url} answered: {reply['error']['message']}")
    return reply
