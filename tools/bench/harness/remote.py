"""A gateway that takes sessions over TLS, the rate of a plain TLS stream beside it, and a link with a delay."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import trustme

import djinn_client as djinn
from djinn_client.transport.remote.tls import fingerprint

CHUNK = 128 << 10
LOOPBACK = "127.0.0.1"


class Door(NamedTuple):
    """The gateway's port, and a token and the fingerprint for its clients."""

    port: int
    token: str
    fingerprint: str

    def address(self, port: int | None = None, host: str = LOOPBACK) -> str:
        return f"djinns://{self.token}@{host}:{port or self.port}#{self.fingerprint}"


@contextmanager
def remote_gateway(folder: Path, daemon: str, host: str = LOOPBACK) -> Iterator[Door]:
    certificate = trustme.CA().issue_cert("localhost", "127.0.0.1")
    pem, file, log = folder / "tls.pem", folder / "remote.yaml", folder / "remote.log"
    certificate.private_key_and_cert_chain_pem.write_to_path(pem)
    tls = f"{{certificate: {pem}, key: {pem}}}"
    file.write_text(f"state_dir: {folder}\nhttp: {tls}\nremote: {{listen: '{host}:0'}}\n")
    with djinn.Client(daemon) as client:
        token = client.add_token("bench").token
    command = [sys.executable, "-m", "djinnd.gateway", f"--config={file}", f"--socket={daemon}"]
    with log.open("w") as said, subprocess.Popen(command, stderr=said) as process:
        try:
            while not (ready := re.search(r"gateway_remote_ready address=[\d.]+:(\d+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            der = ssl.PEM_cert_to_DER_cert(certificate.cert_chain_pems[0].bytes().decode())
            yield Door(int(ready[1]), token, fingerprint(der))
        finally:
            process.terminate()


def tls_rate(nbytes: int) -> float:
    """Bytes a second that one plain TLS stream carries between two processes over loopback."""
    code = f"from tools.bench.harness.remote import send_over_tls; send_over_tls({nbytes})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        memory = memoryview(bytearray(CHUNK))
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as stream:
            stream.recv_into(memory[:1])
            began, got = time.perf_counter(), 1
            while count := stream.recv_into(memory):
                got += count
            return got / (time.perf_counter() - began)


def send_over_tls(nbytes: int) -> None:
    """The sender of `tls_rate`: prints its port, and sends the bytes to the first client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    data = memoryview(bytearray(CHUNK))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        with context.wrap_socket(listener.accept()[0], server_side=True) as stream, suppress(OSError):
            for _ in range(nbytes // CHUNK):
                stream.sendall(data)
            stream.unwrap()


@contextmanager
def slow_link(port: int, delay_s: float, host: str = LOOPBACK) -> Iterator[int]:
    """A port of `host` from which bytes reach `port` of 127.0.0.1, and come back, `delay_s` seconds later."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    found: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(LOOPBACK, port)
        await asyncio.gather(_delayed(reader, back, delay_s), _delayed(there, writer, delay_s))

    def run() -> None:
        server = loop.run_until_complete(asyncio.start_server(serve, host, 0, limit=1 << 24))
        found.append(server.sockets[0].getsockname()[1])
        ready.set()
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        time.sleep(2 * delay_s)  # for the last bytes
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 20):
        loop.call_later(delay_s, writer.write, data)
    loop.call_later(delay_s, writer.close)
