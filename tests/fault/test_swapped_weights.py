"""A checkpoint's files are replaced or cut. KV of the old weights is never used with the new ones, whatever sizes and
times the files have. A file that is cut while it is read fails its own load only."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.lives import Lives
from tests.support.models import tiny_model

PROMPT = [*range(100, 440)]  # more than a page of KV
TOKENS = 6
ROOM = {"kv": "16MiB", "host_kv": "16MiB", "disk_kv": "16MiB"}


def copied(folder: Path) -> Path:
    shutil.copytree(tiny_model(), folder)
    return folder


def swap(folder: Path) -> None:
    """Writes other weights of the same size, with the modification time of the old ones, as `touch -r` sets it."""
    file = folder / "model.safetensors"
    stat = file.stat()
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, folder / "new", metadata={"format": "pt"})
    shutil.copyfile(folder / "new", file)  # the same inode
    (folder / "new").unlink()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size and file.stat().st_mtime_ns == stat.st_mtime_ns


def answer(model: str, address: str) -> tuple[list[int], int]:
    """Returns the tokens, and the number of tokens that the engine has computed."""
    with djinn.Session(model, address=address) as s:
        told = s.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        return told.token_ids, told.usage.computed_tokens


@pytest.fixture
def lives(start_daemon: DaemonStarter, tmp_path: Path) -> Lives:
    """A daemon with a model that has replaceable weights."""
    lives = Lives(start_daemon, ROOM | {"path": str(copied(tmp_path / "m"))})
    lives.wait_for_tiers()
    return lives


def other(lives: Lives, folder: Path) -> list[int]:
    """The tokens of the new weights, from a model that never had the old ones."""
    copy = folder.parent / "other"
    shutil.copytree(tiny_model(), copy)
    swap(copy)
    told = answer(str(copy), lives.address)[0]
    djinn.unload(str(copy), address=lives.address)
    return told


def leave_pages(lives: Lives, tier: djinn.protocol.Tier) -> tuple[str, list[int]]:
    """A session of the old weights that leaves its pages on the tier, and its tokens."""
    with djinn.Session(MODEL, address=lives.address) as s:
        told = s.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        s.truncate(len(PROMPT))
        assert s.pause(tier).pages > 0
        s.detach()
        return s.id, told.token_ids


def goes_on(lives: Lives, session: str) -> tuple[list[int], int]:
    with djinn.Session.attach(session, address=lives.address) as s:
        told = s.generate(max_tokens=TOKENS, ignore_eos=True)
        return told.token_ids, told.usage.computed_tokens


def test_pages_of_earlier_weights_are_not_found(lives: Lives, tmp_path: Path) -> None:
    """After a kill (host), after a stop and a start (disk), and after an unload and a load."""
    session, old = leave_pages(lives, "host")
    lives.kill()
    swap(tmp_path / "m")
    lives.again()
    lives.wait_for_tiers()
    new = other(lives, tmp_path / "m")
    assert new != old
    assert goes_on(lives, session) == (new, len(PROMPT)), "computed again, by the new weights"

    session, _ = leave_pages(lives, "disk")
    lives.stop()
    swap(tmp_path / "m")  # flipped twice: the old weights again, so their pages may be found
    lives.again()
    lives.wait_for_tiers()
    assert goes_on(lives, session)[0] == old

    swap(tmp_path / "m")
    djinn.unload(MODEL, force=True, address=lives.address)
    djinn.load(MODEL, address=lives.address)
    assert answer(MODEL, lives.address)[0] == new


@pytest.mark.smoke
def test_a_saved_session_knows_its_weights(lives: Lives, tmp_path: Path) -> None:
    with djinn.Session(MODEL, address=lives.address) as s:
        s.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        s.save(tmp_path / "saved")
    djinn.Session.load(tmp_path / "saved", address=lives.address).close()
    swap(tmp_path / "m")
    djinn.unload(MODEL, force=True, address=lives.address)
    djinn.load(MODEL, address=lives.address)
    with pytest.raises(djinn.ModelMismatch):
        djinn.Session.load(tmp_path / "saved", address=lives.address)


def test_adopted_weights_keep_the_identity_of_the_read_files(lives: Lives, tmp_path: Path) -> None:
    """A restart that adopts weights from shared memory reads no file; saved sessions and pages still fit."""
    (before,) = (model for model in djinn.models(address=lives.address) if model.name == MODEL)
    session, old = leave_pages(lives, "host")
    lives.kill()
    lives.again()
    lives.wait_for_tiers()
    (after,) = (model for model in djinn.models(address=lives.address) if model.name == MODEL)
    assert after.fingerprint == before.fingerprint
    assert "arena_adopted" in lives.log and "checkpoint_read" not in lives.log
    assert goes_on(lives, session) == (old, 1)


WIDE = 20_000  # intermediate size: some 400 MB


def large(folder: Path) -> tuple[Path, int]:
    """A sparse checkpoint that takes a moment to read, and the size of its header."""
    folder = copied(folder)
    config = json.loads((folder / "config.json").read_text())
    narrow, config["intermediate_size"], config["torch_dtype"] = config["intermediate_size"], WIDE, "float32"
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        shape = [WIDE if side == narrow else side for side in tensor.shape]
        begin, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder, 8 + len(header)


def test_a_file_cut_while_it_is_read_fails_its_own_load_only(start_daemon: DaemonStarter, tmp_path: Path) -> None:
    folder, head = large(tmp_path / "large")
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    daemon = start_daemon({"memory": "2GiB"}, errors=["model_failed"])
    wanted, engine = answer(MODEL, daemon.address)[0], daemon.device().pid
    for keep in (0, head, whole // 3):

        def cut(progress: djinn.Progress, keep: int = keep) -> None:
            if progress.stage == "reading":
                os.truncate(file, keep)

        with pytest.raises(djinn.ModelRejected, match=r"model\.safetensors was cut while it was read: .* tensor "):
            djinn.load(str(folder), kv_bytes=1 << 20, address=daemon.address, on_progress=cut)
        large(tmp_path / f"{keep}")[0].joinpath("model.safetensors").replace(file)
        assert answer(MODEL, daemon.address)[0] == wanted
    assert daemon.device().pid == engine, "the engine must not die"
    assert {model.name for model in djinn.models(address=daemon.address) if model.state == "ready"} == {MODEL}
