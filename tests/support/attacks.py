"""Attacks of a hostile user of the machine. Each is a function that runs in a process of another user.

An attack gets the daemon's address and a folder that its user owns, with a copy of djinn-tiny. It returns when it is
done. It handles or ignores its own errors.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import djinn_client as djinn
from djinn_client.errors import DjinnError
from djinn_client.protocol import HEADER, GetTokens, Hello, OpenSession, Ping, encode
from djinn_client.protocol.requests import AddEdit, Generate

Attack = Callable[[str, Path], None]
MODEL = "djinn-tiny"
TINY = Path(djinn.__file__).parent.parent / "djinnd" / "models" / MODEL
SECONDS = 1.0  # duration of an attack that has no end of its own
WORDS = "def fibonacci(n): return n if n < 2 else x\n"


def copy_of_tiny(folder: Path, **config: Any) -> Path:
    """A checkpoint with `config` merged into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    if config:
        changed = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(changed))
    return folder


# --- connections ----------------------------------------------------------------------------------------------------


def connected(address: str, hello: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(address)
    if hello:
        sock.sendall(encode(Hello(id=0)))
        sock.recv(1 << 16)
    return sock


def for_some_seconds(act: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    with suppress(OSError):
        while time.monotonic() < until:
            act()


def frames_without_end(address: str, folder: Path) -> None:
    socks = [connected(address) for _ in range(30)]
    for sock in socks:
        sock.settimeout(0.3)  # the daemon may stop reading
        with suppress(OSError):
            sock.sendall(HEADER.pack(b"DJ", 1, 0, 16 << 20) + bytes((16 << 20) - 1))
    time.sleep(1)


def much_before_hello(address: str, folder: Path) -> None:
    for _ in range(30):
        with suppress(OSError):
            connected(address, hello=False).sendall(HEADER.pack(b"DJ", 1, 0, 16 << 20) + bytes(8 << 20))


def replies_that_nobody_reads(address: str, folder: Path) -> None:
    with djinn.Session(MODEL, address=address) as s:
        s.generate([7] * 1500, max_tokens=1)
        socks = [connected(address) for _ in range(30)]
        frame = b"".join(encode(GetTokens(id=number, session=s.id)) for number in range(1, 60))
        for sock in socks:
            sock.setblocking(False)

        def ask() -> None:
            for sock in socks:
                with suppress(BlockingIOError):
                    sock.send(frame)
            time.sleep(0.01)

        for_some_seconds(ask)


def garbage(address: str, folder: Path) -> None:
    def once() -> None:
        with suppress(OSError):
            connected(address, hello=bool(os.urandom(1)[0] & 1)).sendall(os.urandom(5000))

    for_some_seconds(once)


def guesses_of_tokens(address: str, folder: Path) -> None:
    def once() -> None:
        sock = connected(address, hello=False)
        sock.sendall(encode(Hello(id=0, token=f"djn_{os.urandom(16).hex()}"), 1) * 10)
        sock.recv(1 << 16)

    for_some_seconds(once)


def requests_without_end(address: str, folder: Path) -> None:
    """Requests of hub ids, which are slow."""
    socks = [connected(address) for _ in range(64)]
    for sock in socks:
        with suppress(OSError):
            for number in range(1, 65):
                sock.sendall(encode(OpenSession(id=number, model="someone/something")))
    time.sleep(2)


def pings_without_end(address: str, folder: Path) -> None:
    sock = connected(address)
    sock.setblocking(False)
    frames = b"".join(encode(Ping(id=number)) for number in range(1, 60))

    def flood() -> None:
        with suppress(BlockingIOError):
            sock.send(frames)
        with suppress(BlockingIOError):
            sock.recv(1 << 16)

    for_some_seconds(flood)


# --- descriptors ----------------------------------------------------------------------------------------------------


def sent(sock: socket.socket, message: Any, fds: list[int]) -> None:
    """Sends the descriptors with the frame's first bytes and closes them, so that only the daemon has them."""
    frame = encode(message, len(fds))
    socket.send_fds(sock, [frame[:4]], fds)
    for fd in fds:
        os.close(fd)
    sock.sendall(frame[4:])


def sockets_that_linger(address: str, folder: Path) -> None:
    sock, kept = connected(address), []
    for number in range(1, 4):
        listener = socket.create_server(("127.0.0.1", 0))
        stuck = socket.create_connection(listener.getsockname())
        stuck.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                stuck.send(bytes(1 << 16))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 4))
        kept.append(listener)
        sent(sock, Ping(id=number), [stuck.detach()])
    time.sleep(2)


def large_memory(address: str, folder: Path) -> None:
    fd = os.memfd_create("large")
    os.posix_fallocate(fd, 0, 1 << 30)
    sent(connected(address), Ping(id=1), [fd])
    time.sleep(1)


def pipes(address: str, folder: Path) -> None:
    sock = connected(address)
    for number in range(1, 200):
        with suppress(OSError):
            reading, writing = os.pipe()
            sent(sock, Ping(id=number), [reading, writing])


# --- requests -------------------------------------------------------------------------------------------------------


def many_tokens(address: str, folder: Path) -> None:
    with djinn.Session(MODEL, address=address) as s:
        frame = encode(Generate(id=1, session=s.id, token_ids=[1] * 8_000_000))
        for _ in range(3):
            with suppress(OSError):
                sock = connected(address)
                sock.sendall(frame)
                sock.recv(1 << 16)


def deep_nesting(address: str, folder: Path) -> None:
    payload = b"\x81\xa4type" + b"\x91" * 4_000_000
    for _ in range(3):
        with suppress(OSError):
            connected(address).sendall(HEADER.pack(b"DJ", 1, 0, len(payload)) + payload)


def many_edits(address: str, folder: Path) -> None:
    values = bytes(2000 * 192 * 4 - 4) + b"\0\0\x80?"
    with djinn.Session(MODEL, address=address) as s:
        sock, number = connected(address), 1

        def add() -> None:
            nonlocal number
            sock.sendall(
                encode(
                    AddEdit(
                        id=number,
                        session=s.id,
                        points=[f"blocks.{number % 8}"],
                        op="replace",
                        rows=2000,
                        values=values,
                        positions=list(range(2000)),
                    )
                )
            )
            sock.recv(1 << 16)
            number += 1

        for_some_seconds(add)


def edits_that_fill_the_journal(address: str, folder: Path) -> None:
    import numpy as np

    values = np.ones((2048, 192), np.float32)

    def fill() -> None:
        s = djinn.Session(MODEL, address=address)
        for number in range(40):
            s.steer(f"blocks.{number % 8}", values, positions=list(range(2048)))

    with suppress(DjinnError):
        for_some_seconds(fill)


def windows_that_are_kept(address: str, folder: Path) -> None:
    kept = []

    def capture() -> None:
        kept.append(s.capture(["blocks.*.hook_resid_post", "blocks.*.hook_mlp_out", "logits"]).run([7] * 1000))
        s.truncate(0)

    with suppress(DjinnError), djinn.Session(MODEL, address=address) as s:
        for_some_seconds(capture)


def long_texts(address: str, folder: Path) -> None:
    def ask() -> None:
        with suppress(DjinnError), djinn.Session(MODEL, address=address) as s:
            s.generate(WORDS * (4_000_000 // len(WORDS)), max_tokens=1)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    tokenizer = json.loads((copy_of_tiny(folder) / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def decoder_bomb(address: str, folder: Path) -> None:
    def plant(tokenizer: dict[str, Any]) -> None:
        stages = [{"type": "Replace", "pattern": {"Regex": "."}, "content": "e"}]
        stages += [
            {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * times} for times in (1000, 1000, 60)
        ]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], *stages]}

    with djinn.Session(with_tokenizer(folder / "bomb", plant), address=address) as s:
        s.generate([5, 6, 7], max_tokens=2, ignore_eos=True)


def slow_pattern(address: str, folder: Path) -> None:
    def plant(tokenizer: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": "a*a*a*[^ab]"}, "behavior": "Isolated", "invert": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}

    with djinn.Session(with_tokenizer(folder / "slow", plant), address=address) as s:
        s.generate("a" * 600 + "b", max_tokens=1, ignore_eos=True)


def many_layers(address: str, folder: Path) -> None:
    made = copy_of_tiny(folder / "layers", num_hidden_layers=6000)
    header = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(6001)}
    text = json.dumps(header).encode()
    (made / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    djinn.plan(str(made), address=address)


def many_positions(address: str, folder: Path) -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2, rotary_dim=16)
    GPTJForCausalLM(config).save_pretrained(folder / "positions")
    path = folder / "positions" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_positions": 30_000_000}))
    djinn.load(str(path.parent), kv_bytes=1 << 20, host_kv_bytes=0, disk_kv_bytes=0, address=address)


def weights_cut_short(address: str, folder: Path) -> None:
    made = copy_of_tiny(folder / "cut")
    file = made / "model.safetensors"
    whole = file.read_bytes()

    def cut(progress: Any) -> None:
        os.truncate(file, len(whole) // 2)

    for _ in range(4):
        file.write_bytes(whole)
        with suppress(DjinnError):
            djinn.load(str(made), kv_bytes=1 << 20, host_kv_bytes=0, address=address, on_progress=cut)
            djinn.unload(str(made), address=address)


def pipe_in_the_place_of_a_file(address: str, folder: Path) -> None:
    for name in ("tokenizer.json", "config.json", "generation_config.json", "model.safetensors"):
        made = copy_of_tiny(folder / f"pipe-{name}")
        (made / name).unlink()
        os.mkfifo(made / name)
        with suppress(DjinnError):
            djinn.load(str(made), address=address)


def one_model_by_many_names(address: str, folder: Path) -> None:
    made = copy_of_tiny(folder / "one")
    for number in range(6):
        os.symlink(made, folder / f"link-{number}")
        with suppress(DjinnError):
            djinn.load(str(folder / f"link-{number}"), kv_bytes=1 << 20, host_kv_bytes=8 << 20, address=address)


def disk_of_petabytes(address: str, folder: Path) -> None:
    made = copy_of_tiny(folder / "disk", num_hidden_layers=1)
    djinn.load(str(made), kv_bytes=4 << 20, host_kv_bytes=4 << 20, disk_kv_bytes=1 << 50, address=address)


def models_of_others(address: str, folder: Path) -> None:
    for act in (
        lambda: djinn.unload(MODEL, address=address),
        lambda: djinn.load(MODEL, kv_bytes=1, keep_alive_s=0.1, address=address),
        lambda: djinn.plan("/root", address=address),
        lambda: djinn.load("/proc/self/fd", address=address),
        lambda: djinn.load("/dev", address=address),
    ):
        with suppress(DjinnError):
            act()


def sessions_of_others(address: str, folder: Path) -> None:
    for info in djinn.sessions(address=address):
        with suppress(DjinnError):
            djinn.Session.attach(info.id, address=address).close()


ATTACKS: tuple[Attack, ...] = (
    frames_without_end,
    much_before_hello,
    replies_that_nobody_reads,
    garbage,
    guesses_of_tokens,
    requests_without_end,
    pings_without_end,
    sockets_that_linger,
    large_memory,
    pipes,
    many_tokens,
    deep_nesting,
    many_edits,
    edits_that_fill_the_journal,
    windows_that_are_kept,
    long_texts,
    decoder_bomb,
    slow_pattern,
    many_layers,
    many_positions,
    weights_cut_short,
    pipe_in_the_place_of_a_file,
    one_model_by_many_names,
    disk_of_petabytes,
    models_of_others,
    sessions_of_others,
)


def become(user: int) -> None:
    """Changes this process's user, irrevocably."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def run_as(user: int, attack: Attack, address: str, folder: Path, seconds: float) -> str:
    """Runs the attack in a process of that user, and kills it after `seconds`. → the error that the attack reports, or
    ""."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(user)
            attack(address, folder)
            told = "done"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode(errors="replace")[:2000])
        os._exit(0)
    os.close(writing)
    killer = threading.Timer(seconds, os.kill, (pid, 9))
    killer.start()
    with open(reading, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    killer.cancel()
    return told or f"killed after {seconds:g} s"
