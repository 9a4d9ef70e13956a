"""Sessions of another machine beside the conformance suite: naming a daemon, trusting it, and what cannot travel."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trustme

import djinn_client as djinn
from djinn_client.protocol import Progress
from djinn_client.transport.address import hosts_file
from djinn_client.transport.remote import channel
from djinn_client.transport.remote.hosts import read_hosts
from tests.conftest import MODEL
from tests.support.bad_proxy import CuttingProxy
from tests.support.daemon import PATIENCE, ROOT, Daemon, clean_environ, wait_for
from tests.support.remote import RemoteGateway, daemon_fixture, gateway_fixture, token_of

SMALL = 4000  # bytes of frames without windows, acknowledgements included

daemon = daemon_fixture()
gateway = gateway_fixture({"grace": "3s"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DJINND_ADDRESS", raising=False)
    return tmp_path


def djinnctl(home: Path, *arguments: str, said: str = "", code: int = 0, address: str = "") -> str:
    """Returns its output. `code` -1: any exit status."""
    environ = clean_environ() | {"XDG_CONFIG_HOME": str(home), "NO_COLOR": "1"}
    environ |= {"DJINND_ADDRESS": address} if address else {}
    command = [sys.executable, "-m", "djinnctl", *arguments]
    ended = subprocess.run(command, env=environ, cwd=ROOT, input=said, capture_output=True, text=True, timeout=60)
    assert (code < 0 or ended.returncode == code) and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_one_line_from_the_administrator_lets_a_client_in(daemon: Daemon, gateway: RemoteGateway, home: Path) -> None:
    url = djinnctl(home, "token", "add", "ana", "--url", f"127.0.0.1:{gateway.port}", address=daemon.address).strip()
    assert url.startswith("djinns://djn_") and url.endswith(gateway.fingerprint)
    assert "is trusted" in djinnctl(home, "trust", url, "--name", "gpu")
    assert hosts_file().stat().st_mode & 0o077 == 0
    assert json.loads(djinnctl(home, "status", "--json"))["state"] == "ready"
    with djinn.Session(MODEL) as s, djinn.Client("gpu") as client:
        assert s.generate("def f", max_tokens=2, ignore_eos=True).token_ids
        assert client.welcome().name == "ana"


def test_a_certificate_is_shown_and_trusted_on_first_use(daemon: Daemon, gateway: RemoteGateway, home: Path) -> None:
    url = f"djinns://{token_of(daemon, 'first')}@127.0.0.1:{gateway.port}"
    assert gateway.fingerprint in djinnctl(home, "trust", url, said="n\n", code=1)
    assert not hosts_file().exists()
    djinnctl(home, "trust", url, said="y\n")
    assert read_hosts(hosts_file()).hosts["127.0.0.1"].fingerprint == gateway.fingerprint
    with djinn.Client("127.0.0.1") as client:
        client.ping()
    wrong = url + "#" + gateway.fingerprint[:-4] + "0000"
    assert "and not" in djinnctl(home, "trust", wrong, code=2)


@pytest.mark.long
def test_an_authority_certifies_a_host(daemon: Daemon, gateway: RemoteGateway, home: Path) -> None:
    hosts_file().parent.mkdir()
    told = f'[hosts.gpu]\naddress = "djinns://localhost:{gateway.port}"\nca = "{gateway.authority_file}"\n'
    hosts_file().write_text(told)
    with djinn.Client("gpu", token=token_of(daemon, "certified")) as client:
        client.ping()
    trustme.CA().cert_pem.write_to_path(home / "other.pem")
    hosts_file().write_text(told.replace(str(gateway.authority_file), str(home / "other.pem")))
    with pytest.raises(djinn.CertificateNotTrusted, match="no authority"):
        djinn.Client("gpu", token="djn_x").ping()


def test_a_connection_that_was_idle_is_used_again(
    daemon: Daemon, gateway: RemoteGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    with djinn.Client(gateway.address_for(token_of(daemon, "idle"))) as client:
        client.ping()
        before = gateway.log.count("remote_resumed")
        passed[0] = 10 * channel.DEAD_S
        client.ping()
        assert gateway.log.count("remote_resumed") == before


def test_a_folder_of_the_client_s_machine_is_refused_with_a_remedy(daemon: Daemon, gateway: RemoteGateway) -> None:
    address = gateway.address_for(token_of(daemon, "folder"))
    with pytest.raises(djinn.InvalidRequest, match="share_model"):
        djinn.Session("/home/me/model", address=address)


def test_a_download_tells_how_far_it_is(daemon: Daemon, gateway: RemoteGateway, tmp_path: Path) -> None:
    told: list[Progress] = []
    address = gateway.address_for(token_of(daemon, "downloader"))
    with djinn.Session(MODEL, address=address) as s:
        s.generate("def f", max_tokens=4, ignore_eos=True)
        nbytes = len(s.kv(on_progress=told.append).memory)
        assert (told[-1].model, told[-1].stage) == (MODEL, "receiving")
        assert told[-1].done == told[-1].total == nbytes
        told.clear()
        s.save(tmp_path / "session", kv=True, on_progress=told.append)
        assert told[-1].done == told[-1].total == nbytes
        told.clear()
        s.capture("blocks.0.hook_resid_post").run(" g", on_progress=told.append)
        s.forward([1, 2], on_progress=told.append)
    assert {now.stage for now in told} == {"receiving"}
    told.clear()
    with djinn.Session.load(tmp_path / "session", address=address, on_progress=told.append):
        sent = [now for now in told if now.stage == "sending"]
        assert sent[-1].done == sent[-1].total == nbytes


def test_a_hit_crosses_the_network_once_and_then_only_rows_that_were_changed(
    daemon: Daemon, gateway: RemoteGateway
) -> None:
    token = token_of(daemon, "stopper")
    prompt = [n % 200 + 50 for n in range(1000)]
    with CuttingProxy(gateway.port) as proxy:

        def passed_in(call: Callable[..., Any], *given: Any) -> int:
            before = proxy.passed
            call(*given, max_tokens=1)
            return proxy.passed - before

        with djinn.Session(MODEL, address=gateway.address_for(token, proxy.port)) as s:
            stop = s.breakpoint(layer=2)
            s.run(prompt, max_tokens=1)
            assert passed_in(s.resume) < SMALL
            s.truncate(0)
            before = proxy.passed
            hit = s.run(prompt, max_tokens=1)
            assert isinstance(hit, djinn.Hit)
            window, row = hit.activation.nbytes, hit.activation[:, -1].nbytes
            assert 500_000 < window < proxy.passed - before < 1.1 * window
            hit.activation[:, -1] *= 2
            assert row < passed_in(s.resume) < row + SMALL
            stop.remove()
            s.truncate(0)
            seen: list[int] = []
            s.intervene("blocks.4.hook_resid_post", lambda activation, _: seen.append(activation.nbytes), local=True)
            assert window < passed_in(s.generate, prompt) < 1.1 * window
            assert seen == [window]


@pytest.mark.long
def test_a_model_is_shared_from_another_machine(daemon: Daemon, gateway: RemoteGateway) -> None:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    address = gateway.address_for(token_of(daemon, "sharer"))
    told: list[Progress] = []
    options: dict[str, Any] = {"name": "shared", "kv_bytes": 4 << 20, "address": address}
    with djinn.share_model(model, **options, on_progress=told.append) as handle:
        sent = [now for now in told if now.stage == "sending" and now.total > sum(map(torch.numel, model.parameters()))]
        assert sent[-1].done == sent[-1].total and sent[-1].model == "shared"
        with djinn.Session(handle.name, address=address) as s:
            logits = s.forward([1, 2, 3])
            kv = s.kv()
        with djinn.Session.from_kv(handle.name, [1, 2, 3, 4], kv, address=address) as again:
            assert again.forward([5]).shape == (1, 128)
    expected = model(torch.tensor([[1, 2, 3]])).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


def test_calls_without_a_session_records_and_resume_points_serve_another_machine(
    daemon: Daemon, gateway: RemoteGateway
) -> None:
    address = gateway.address_for(token_of(daemon, "all"))
    with djinn.Client(address) as client, djinn.Session(MODEL, address=address) as s:
        assert client.detokenize(MODEL, client.tokenize(MODEL, "def f", add_special=False)) == "def f"
        texts = ["A river.", "A stream."]
        here = [list(vector) for vector in djinn.embed(MODEL, texts, address=daemon.address)]
        np.testing.assert_allclose([list(vector) for vector in client.embed(MODEL, texts)], here, atol=1e-5)
        s.breakpoint("blocks.4.hook_resid_post")
        hit = s.run("def f", max_tokens=4)
        assert isinstance(hit, djinn.Hit) and len(s.breakpoints()) == 1
        first = s.resume(max_tokens=4, ignore_eos=True)
        again = s.resume_from(hit, max_tokens=4, ignore_eos=True)
        assert isinstance(first, djinn.Generated) and isinstance(again, djinn.Generated)
        assert again.token_ids == first.token_ids
        with djinn.Session(MODEL, address=address) as kept:
            before = kept.generate("import", max_tokens=2, ignore_eos=True)
            name = kept.keep_record(b"mine")
        assert client.record(name).body == b"mine"
        after = client.generate(MODEL, [], after=name, max_tokens=2, ignore_eos=True)
        assert len(before.token_ids) == len(after.token_ids) == 2
        client.drop_record(name)
        with pytest.raises(djinn.DjinnError):
            client.record(name)


def lasting_port() -> int:
    """An unused port below the kernel's range for connections, so that no other process gets it when it is free."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, int(first))))
            return int(probe.getsockname()[1])


@pytest.mark.long
def test_a_session_outlives_its_gateway(daemon: Daemon, tmp_path: Path) -> None:
    port = lasting_port()
    with RemoteGateway(tmp_path, daemon, {"listen": f"127.0.0.1:{port}"}) as gateway:
        address = gateway.address_for(token_of(daemon, "patient"))
        s = djinn.Session(MODEL, address=address)
        s.generate("def f", max_tokens=4, ignore_eos=True)
        tokens = s.token_ids()
    with pytest.raises(djinn.ConnectionLost):
        s.token_ids()
    other = tmp_path / "other"
    other.mkdir()
    with RemoteGateway(other, daemon, {"listen": f"127.0.0.1:{port}"}), pytest.raises(djinn.CertificateNotTrusted):
        s.token_ids()  # the second gateway has a certificate of its own
    with daemon.client() as client:
        assert [info.tokens for info in client.sessions() if info.id == s.id] == [len(tokens)]
        client.close_session(s.id)
    s.detach()


@pytest.mark.long
def test_a_client_that_is_killed_frees_its_session_after_the_grace(daemon: Daemon, gateway: RemoteGateway) -> None:
    address = gateway.address_for(token_of(daemon, "killed"))
    code = f"import djinn_client as d; s = d.Session({MODEL!r}, address={address!r}); print(s.id, flush=True); input()"
    client = subprocess.Popen(
        [sys.executable, "-c", code], env=clean_environ(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout is not None and client.stdin is not None
    session = client.stdout.readline().decode().strip()
    assert session
    client.kill()
    client.wait()
    client.stdout.close()
    client.stdin.close()
    wait_for(lambda: "the client did not come back" in gateway.log)
    with djinn.Session.attach(session, address=address) as s:
        assert s.token_ids() == []


def test_a_gateway_that_stops_lets_a_stream_finish(daemon: Daemon, tmp_path: Path) -> None:
    with RemoteGateway(tmp_path, daemon) as stopping:
        idle = djinn.Client(stopping.address_for(token_of(daemon, "beside")))
        idle.ping()
        with djinn.Session(MODEL, address=stopping.address_for(token_of(daemon, "finishing"))) as s:
            pieces = s.stream("def f", max_tokens=100, ignore_eos=True)
            tokens = list(next(pieces).token_ids)
            stopping.process.terminate()
            wait_for(lambda: "gateway_draining" in stopping.log)
            tokens += [token for piece in pieces for token in piece.token_ids]
            assert len(tokens) == 100
            assert stopping.process.wait(PATIENCE) == 0
        idle.close()


def test_a_second_signal_stops_a_gateway_at_once(daemon: Daemon, tmp_path: Path) -> None:
    token = token_of(daemon, "stopped")
    with (
        RemoteGateway(tmp_path, daemon, http={"drain_seconds": "10min"}) as stopping,
        djinn.Session(MODEL, address=stopping.address_for(token)) as s,
        ThreadPoolExecutor() as threads,
    ):
        s.pause()
        call = threads.submit(s.generate, "def f", max_tokens=1)
        with daemon.client() as client:
            wait_for(lambda: client.status().requests_queued == 1)
        stopping.process.terminate()
        wait_for(lambda: "gateway_draining" in stopping.log)
        stopping.process.terminate()
        assert stopping.process.wait(PATIENCE) == 0
        with pytest.raises(djinn.ConnectionLost):
            call.result(PATIENCE)
