"""Sessions and their KV leave the daemon and come back, as tensors and as files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, descriptors_of, wait_for
from tests.support.models import reduced_model, tiny_model

PROMPT = [300, 20, 101, 7, 55, 430, 12] * 40  # more than a page
NEW = 12


def greedy(session: djinn.Session, prompt: list[int] | None = None, count: int = NEW) -> list[int]:
    return session.generate(prompt, max_tokens=count, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def told(daemon: Daemon) -> list[int]:
    """The tokens of an uninterrupted session: twice NEW."""
    with djinn.Session(MODEL, address=daemon.address) as s:
        return greedy(s, PROMPT, 2 * NEW)


@pytest.fixture
def session(daemon: Daemon, told: list[int]) -> Iterator[djinn.Session]:
    """A session that has generated the first half of these tokens."""
    with djinn.Session(MODEL, address=daemon.address) as s:
        assert greedy(s, PROMPT) == told[:NEW]
        yield s
    with daemon.client() as client:
        wait_for(lambda: client.sessions() == [])
        assert client.status(check=True).integrity == []
    assert not any("/memfd:djinn" in name for name in descriptors_of(daemon.pid))


# --- KV -------------------------------------------------------------------------------------------------------------


def test_a_session_continues_from_its_own_kv(session: djinn.Session, told: list[int]) -> None:
    address = session._calls._address
    kv = session.kv()
    assert kv.tokens == session.token_ids() and kv.length == len(PROMPT) + NEW
    with djinn.Session.from_kv(MODEL, kv.tokens, kv, address=address) as other:
        assert other.info.foreign_kv and not session.info.foreign_kv
        assert other.token_ids() == kv.tokens
        reply = other.generate(max_tokens=NEW, ignore_eos=True)
        assert (reply.token_ids, reply.usage.computed_tokens) == (told[NEW:], 1)
    with djinn.Session.from_kv(MODEL, kv.tokens, kv.pages, address=address, priority="batch") as other:
        assert other.info.priority == "batch" and greedy(other) == told[NEW:]
    assert greedy(session) == told[NEW:]


def test_kv_that_transformers_computed(session: djinn.Session, told: list[int]) -> None:
    """The KV is computed into a window, without a copy."""
    address = session._calls._address
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    with torch.inference_mode():
        cache = model(torch.tensor([PROMPT]), use_cache=True).past_key_values
    window = djinn.kv_window(MODEL, len(PROMPT), address=address)
    for block, layer in enumerate(cache.layers):
        window.put(block, layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
    for _ in range(2):  # the window stays the caller's
        with djinn.Session.from_kv(MODEL, PROMPT, window, address=address) as other:
            assert greedy(other) == told[:NEW]
    window.close()


@pytest.mark.long
def test_edited_kv_changes_the_tokens_of_its_session_only(session: djinn.Session, told: list[int]) -> None:
    address = session._calls._address
    kv = session.kv()
    kv.pages.neg_()
    with djinn.Session.from_kv(MODEL, kv.tokens, kv, address=address) as other, other.fork() as fork:
        assert fork.info.foreign_kv
        said = greedy(other, [7], 300)
        assert said[:NEW] == greedy(fork, [7])
        with djinn.Session(MODEL, address=address) as same:
            honest = greedy(same, [*kv.tokens, 7])
            assert said[:NEW] != honest
        with djinn.Session(MODEL, address=address) as again:
            assert greedy(again, [*kv.tokens, 7]) == honest
    assert greedy(session) == told[NEW:]


def test_a_prompt_behind_kv_of_a_client_with_lower_tiers(session: djinn.Session, daemon: Daemon) -> None:
    """The lower tiers are searched by the keys of the session's full pages, also when it wakes up."""
    with daemon.client() as client:
        wait_for(lambda: all(model.host_pages for model in client.models() if model.name == MODEL))
    kv = session.kv()
    with djinn.Session.from_kv(MODEL, kv.tokens, kv, address=daemon.address) as other:
        other.signal("IO_WAIT")
        other.signal("COMPUTE")
        assert greedy(other, [7, 8, 9]) == greedy(session, [7, 8, 9])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_of_a_client_comes_back_from_the_lower_tiers(session: djinn.Session, tier: djinn.protocol.Tier) -> None:
    address = session._calls._address
    kv = session.kv()
    kv.pages.neg_()
    with djinn.Session.from_kv(MODEL, kv.tokens or [], kv, address=address) as other:
        with other.fork() as fork:
            said = greedy(fork, [7])
        assert other.pause(tier).pages == 2
        other.unpause()
        assert torch.equal(other.kv().key(3), kv.key(3))
        assert greedy(other, [7]) == said


def test_bfloat16_travels_too(start_daemon: DaemonStarter) -> None:
    name = str(reduced_model("llama-2"))
    daemon = start_daemon({"models": {"half": {"path": name, "dtype": "bfloat16"}}})
    with djinn.Session("half", address=daemon.address) as s:
        whole = greedy(s, [5, 6, 7, 8], 2 * NEW)
        s.truncate(4 + NEW)
        kv = s.kv()
        assert kv.pages.dtype == torch.bfloat16
        with djinn.Session.from_kv("half", kv.tokens, kv, address=daemon.address) as other:
            assert torch.equal(other.kv().key(1), kv.key(1))
            assert greedy(other, whole[NEW:][:1], 4) == greedy(s, whole[NEW:][:1], 4)


def test_invalid_kv_is_refused(session: djinn.Session) -> None:
    address = session._calls._address
    kv = session.kv()
    assert kv.tokens is not None
    for tokens, given, words in (
        (kv.tokens[:-1], kv, "tokens came with it"),
        (kv.tokens, kv.pages[:1], "the pages must be"),
        (kv.tokens, kv.pages.half(), "not float16"),
        ([*kv.tokens[:-1], 1 << 20], kv, "out of range"),
        (kv.tokens * 1000, kv, "send a shorter|takes"),
        (
            kv.tokens,
            djinn.KvWindow(djinn.KvLayout("float32", 8, 16, 2, 32), 16),
            "djinn-tiny has float32 pages of 256 tokens .* the given KV has float32 pages of 16 tokens",
        ),
    ):
        with pytest.raises(djinn.InvalidRequest, match=words):
            djinn.Session.from_kv(MODEL, tokens, given, address=address)
    with pytest.raises(djinn.ModelNotFound):
        djinn.Session.from_kv("nothing", kv.tokens, kv, address=address)
    with pytest.raises(djinn.InvalidRequest, match="1 or more"):
        djinn.kv_window(MODEL, 0, address=address)
    with djinn.Session(MODEL, address=address) as empty, pytest.raises(djinn.InvalidRequest, match="is empty"):
        empty.kv()


def test_a_call_during_an_export_gets_session_busy(session: djinn.Session, daemon: Daemon) -> None:
    """kv() during a call gets it too."""
    same = djinn.Session.attach(session.id, address=daemon.address)
    stream = session.stream(max_tokens=200, ignore_eos=True)
    next(stream)
    with pytest.raises(djinn.SessionBusy):
        same.kv()
    stream.close()
    errors: list[Exception] = []

    def exports() -> None:
        for _ in range(20):
            try:
                same.kv()
            except djinn.SessionBusy as error:
                errors.append(error)

    thread = threading.Thread(target=exports)
    thread.start()
    while thread.is_alive():
        try:
            greedy(session, [9], 1)
        except djinn.SessionBusy as error:
            errors.append(error)
    thread.join()
    same.detach()
    assert all("busy with another call" in str(error) for error in errors)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_kv", [None, False, True])
def test_a_saved_session_continues(
    session: djinn.Session, told: list[int], tmp_path: Path, with_kv: bool | None
) -> None:
    address, path = session._calls._address, tmp_path / "s.djinn"
    session.save(path, kv=with_kv)
    assert (path.stat().st_size > 1 << 20) == bool(with_kv)
    with djinn.load_session(path, address=address) as other:
        assert other.token_ids() == session.token_ids()
        assert (other.info.foreign_kv, other.info.model, other.info.priority) == (bool(with_kv), MODEL, "interactive")
        assert greedy(other) == told[NEW:]
    again = djinn.load_session(str(path), address=address)
    assert isinstance(again, djinn.Session)
    again.close()


def test_a_file_has_kv_of_a_client_unless_it_is_excluded(session: djinn.Session, tmp_path: Path) -> None:
    address, path = session._calls._address, tmp_path / "s.djinn"
    kv = session.kv()
    kv.pages.neg_()
    with djinn.Session.from_kv(MODEL, kv.tokens, kv, address=address) as other:
        other.save(path)
        said = greedy(other, [7])
    with djinn.Session.load(path, address=address, priority="agent") as loaded:
        assert loaded.info.priority == "agent" and greedy(loaded, [7]) == said
    with djinn.Session.load(path, address=address, kv=False) as honest:
        assert not honest.info.foreign_kv and greedy(honest, [7]) == greedy(session, [7])


def test_an_empty_session_may_be_saved(daemon: Daemon, tmp_path: Path) -> None:
    with djinn.Session(MODEL, address=daemon.address) as s:
        s.save(tmp_path / "s")
    with djinn.load_session(tmp_path / "s", address=daemon.address) as other:
        assert other.token_ids() == []
        assert len(greedy(other, [1, 2, 3])) == NEW


def test_another_model_is_named_with_both_fingerprints(daemon: Daemon, session: djinn.Session, tmp_path: Path) -> None:
    path = tmp_path / "s.djinn"
    session.save(path)
    other = str(reduced_model("llama-2"))
    (ours,) = (model.fingerprint for model in djinn.models(address=daemon.address) if model.name == MODEL)
    with pytest.raises(djinn.ModelMismatch, match=rf"fingerprint {ours}, .* has [0-9a-f]{{64}}: load the model"):
        djinn.Session.load(path, model=other, address=daemon.address)
    djinn.unload(other, address=daemon.address)


def test_a_session_moves_between_daemons_and_copies_of_a_checkpoint(
    session: djinn.Session, told: list[int], tmp_path: Path, start_daemon: DaemonStarter
) -> None:
    session.save(tmp_path / "s.djinn", kv=True)
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    for file in Path(tiny_model()).iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    daemon = start_daemon()
    with djinn.Session.load(tmp_path / "s.djinn", model=str(elsewhere), address=daemon.address) as other:
        assert greedy(other) == told[NEW:]


def test_a_damaged_file_is_found_before_a_session_is_opened(
    daemon: Daemon, session: djinn.Session, tmp_path: Path
) -> None:
    path = tmp_path / "s.djinn"
    session.save(path, kv=True)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(djinn.FileDamaged, match="checksum"):
        djinn.load_session(path, address=daemon.address)
    with djinn.Session.load(path, kv=False, address=daemon.address) as other:
        assert other.token_ids() == session.token_ids()
    with pytest.raises(djinn.FileDamaged, match="no saved session"):
        djinn.Session.load(Path(__file__), address=daemon.address)
    with pytest.raises(FileNotFoundError):
        djinn.Session.load(tmp_path / "none", address=daemon.address)
    assert [info.id for info in djinn.sessions(address=daemon.address)] == [session.id]


def test_the_asynchronous_client_gives_the_same(session: djinn.Session, told: list[int], tmp_path: Path) -> None:
    address = session._calls._address

    async def case() -> None:
        async with await djinn.AsyncSession.load(tmp_path / "s", address=address) as other:
            kv = await other.kv()
            await other.save(tmp_path / "t", kv=True)
            async with await djinn.AsyncSession.from_kv(MODEL, kv.tokens or [], kv, address=address) as third:
                assert (await third.generate(max_tokens=NEW, ignore_eos=True)).token_ids == told[NEW:]
        async with await djinn.AsyncSession.load(tmp_path / "t", address=address) as other:
            assert (await other.generate(max_tokens=NEW, ignore_eos=True)).token_ids == told[NEW:]

    session.save(tmp_path / "s")
    asyncio.run(case())
