from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from djinn_client.errors import ModelNotFound, ModelRejected
from djinnd.weights.checkpoint import CheckpointFiles
from tests.support.open_files import checkpoint_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INDEXED = {"a": "1.safetensors", "b": "2.safetensors"}
TENSORS = {"a": torch.arange(6, dtype=BF16).view(2, 3), "b": torch.ones(4, dtype=BF16)}


def write(folder: Path, files: dict[str, dict[str, Tensor]], index: dict[str, str] | None = None) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def single(folder: Path, tensors: dict[str, Tensor] = TENSORS) -> Path:
    return write(folder, {"model.safetensors": tensors})


def sharded(folder: Path) -> Path:
    files = {f"model-0000{i}-of-00002.safetensors": {name: TENSORS[name]} for i, name in ((1, "a"), (2, "b"))}
    return write(folder, files, {name: file for file, tensors in files.items() for name in tensors})


@pytest.mark.parametrize("write_it", [single, sharded], ids=["single", "sharded"])
def test_all_tensors_are_known_and_read(tmp_path: Path, write_it: object) -> None:
    checkpoint = checkpoint_of(write_it(tmp_path))  # type: ignore[operator]
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {"a": (2, 3), "b": (4,)}
    for name, tensor in TENSORS.items():
        checkpoint.check_readable(name)
        assert torch.equal(checkpoint.read(name), tensor)


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"it has no config\.json"):
        checkpoint_of(tmp_path)


def test_other_formats_are_refused_with_a_hint_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFound, match=r"its weights are pickles .*: convert them to safetensors"):
        checkpoint_of(tmp_path)


@pytest.mark.parametrize("text", ["{not json", "", "[1, 2]", "\xff\xfe"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    single(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelRejected, match=r"config\.json is not") as told:
        checkpoint_of(tmp_path)
    assert told.value.data["file"].endswith("config.json")


@pytest.mark.parametrize("kept", [5, 60, -1], ids=["in the length", "in the header", "in the data"])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    single(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(ModelRejected, match=r"model\.safetensors is damaged or cut short") as told:
        checkpoint_of(tmp_path)
    assert told.value.data["file"] == file.name


def test_a_file_of_garbage_is_named(tmp_path: Path) -> None:
    single(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(os.urandom(4096))
    with pytest.raises(ModelRejected, match=r"model\.safetensors is damaged"):
        checkpoint_of(tmp_path)


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelRejected, match=r"model-00002-of-00002\.safetensors"):
        checkpoint_of(tmp_path)


def test_a_tensor_of_the_index_that_no_file_has_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {"x.safetensors": TENSORS}, {"a": "x.safetensors", "ghost": "x.safetensors"})
    with pytest.raises(ModelRejected, match="lists tensor ghost in x") as told:
        checkpoint_of(folder)
    assert told.value.data["tensor"] == "ghost"


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelRejected, match=r"model\.safetensors\.index\.json"):
        checkpoint_of(tmp_path)


def test_other_safetensors_files_are_ignored(tmp_path: Path) -> None:
    """Checkpoints may contain variants of themselves, in another precision or in the authors' own layout."""
    other = {"a": torch.zeros(9)}
    write(tmp_path, {"model.fp32.safetensors": other, "consolidated.safetensors": other})
    assert checkpoint_of(single(tmp_path)).tensors["a"].shape == (2, 3)


def test_a_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    single(sharded(tmp_path), {"only": torch.ones(2)})
    assert set(checkpoint_of(tmp_path).tensors) == {"only"}


@pytest.mark.parametrize(
    ("tensors", "dtype"),
    [
        ({"a": torch.ones(8, dtype=BF16), "b": torch.ones(7, dtype=F32)}, BF16),
        ({"a": torch.ones(8, dtype=BF16), "b": torch.ones(3, 3, dtype=F32)}, F32),
        ({"a": torch.ones(2, dtype=F16), "mask": torch.ones(99, dtype=torch.bool)}, F16),
    ],
    ids=["bfloat16", "float32", "masks do not count"],
)
def test_the_dtype_is_that_of_most_weights(tmp_path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert checkpoint_of(single(tmp_path, tensors)).dtype == dtype


def test_a_tensor_of_integers_is_refused_only_if_it_is_needed(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(single(tmp_path, {**TENSORS, "packed": torch.ones(4, dtype=torch.int32)}))
    checkpoint.check_readable("a")
    with pytest.raises(ModelRejected, match=r"model\.safetensors: tensor packed is I32; djinnd reads only F32, F16"):
        checkpoint.check_readable("packed")


@pytest.mark.parametrize("tensors", [{}, {"a": torch.ones(4, dtype=torch.int8)}], ids=["nothing", "only integers"])
def test_a_checkpoint_without_weights_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ModelRejected, match="has no F32, F16 or BF16 weights"):
        checkpoint_of(single(tmp_path, tensors))


def test_the_fingerprint_stays_until_something_changes(tmp_path: Path) -> None:
    folder = single(tmp_path)
    first = checkpoint_of(folder).fingerprint()
    assert checkpoint_of(folder).fingerprint() == first
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 1.0}')
    configured = checkpoint_of(folder).fingerprint()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    touched = checkpoint_of(folder).fingerprint()
    single(folder, {"a": TENSORS["a"]})
    assert len({first, configured, touched, checkpoint_of(folder).fingerprint()}) == 4


def test_other_weights_with_equal_times_have_another_fingerprint_and_identity(tmp_path: Path) -> None:
    """`touch -r`, rsync and image builds leave equal names, sizes and modification times."""
    folder = single(tmp_path)
    file = folder / "model.safetensors"
    before, stat = read_whole(folder), file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = read_whole(folder)
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (stat.st_mtime_ns, stat.st_size)
    assert after.fingerprint() != before.fingerprint() and after.identity() != before.identity()


def test_a_tensor_in_two_shards_is_the_one_that_the_index_names(tmp_path: Path) -> None:
    old, new = {"a": TENSORS["a"], "b": TENSORS["b"] * 5}, {"a": TENSORS["a"] * 5, "b": TENSORS["b"]}
    checkpoint = checkpoint_of(write(tmp_path, {"1.safetensors": old, "2.safetensors": new}, INDEXED))
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())


def test_all_shards_that_are_missing_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {"1.safetensors": TENSORS}, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"})
    with pytest.raises(ModelRejected, match=r"2\.safetensors and 1 more of the 3 files .* are missing") as told:
        checkpoint_of(tmp_path)
    assert told.value.data == {"file": "2.safetensors", "missing": 2}


def test_an_index_cannot_name_files_of_other_folders(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    single(tmp_path)
    folder = write(tmp_path / "mine", {}, {"a": "../model.safetensors"})
    with pytest.raises(ModelRejected, match="are missing"):
        checkpoint_of(folder)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "a git-lfs pointer"),
        (b"<!DOCTYPE html><html>no</html>", "an HTML page"),
        (b"GGUF\x03\x00", "a GGUF file"),
        (b"", "empty"),
    ],
    ids=["lfs", "html", "gguf", "empty"],
)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_of_another_format_is_refused_with_its_format(
    tmp_path: Path, file: str, content: bytes, what: str
) -> None:
    single(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelRejected, match=rf"{file} is {what}|config.json is not readable JSON"):
        checkpoint_of(tmp_path)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["as it is", "converted"])
def test_a_file_that_is_cut_after_its_header_was_read_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = single(tmp_path)
    checkpoint = checkpoint_of(folder)
    os.truncate(folder / "model.safetensors", checkpoint.tensors["a"].start + 5)
    with pytest.raises(ModelRejected, match=r"model\.safetensors was cut while it was read: .* tensor a") as told:
        checkpoint.read_into("a", torch.empty(2, 3, dtype=dtype))
    assert told.value.data == {"file": "model.safetensors", "tensor": "a"}


def test_large_tensors_are_read_in_pieces_and_converted_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(37, 11)
    folder = single(tmp_path, {"a": tensor})
    whole = read_whole(folder).identity()
    monkeypatch.setattr("djinnd.weights.checkpoint.PIECE", 64)
    checkpoint = read_whole(folder)
    assert checkpoint.identity() == whole and checkpoint.files.bytes_read > tensor.nbytes
    assert torch.equal(checkpoint.read("a"), tensor)
    half = torch.empty(37, 11, dtype=F16)
    checkpoint.read_into("a", half)
    assert torch.equal(half, tensor.half())


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"a has shape \[2, 3\] in the checkpoint, but the model needs \[3, 2\]"):
        checkpoint_of(single(tmp_path)).read_into("a", torch.empty(3, 2, dtype=BF16))


def read_whole(folder: Path) -> CheckpointFiles:
    checkpoint = checkpoint_of(folder)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    return checkpoint


def test_the_identity_is_equal_for_copies_and_differs_for_other_weights(tmp_path: Path) -> None:
    def made(name: str, tensors: dict[str, Tensor], config: str = '{"model_type": "llama"}') -> str:
        folder = tmp_path / name
        folder.mkdir()
        single(folder, tensors)
        (folder / "config.json").write_text(config)
        os.utime(folder / "model.safetensors", (len(name), len(name)))
        return read_whole(folder).identity()

    identity = made("one", TENSORS)
    (tmp_path / "sharded").mkdir()
    assert read_whole(sharded(tmp_path / "sharded")).identity() == identity  # the identity does not depend on the files
    assert made("copy", TENSORS) == identity
    assert made("moved", TENSORS, '{"model_type": "llama", "_name_or_path": "/x"}') == identity
    others = [
        made("config", TENSORS, '{"model_type": "llama", "rope_theta": 1e6}'),
        made("name", {"c": TENSORS["a"], "b": TENSORS["b"]}),
        made("shape", {"a": TENSORS["a"].view(3, 2), "b": TENSORS["b"]}),
        made("dtype", {"a": TENSORS["a"].to(F16), "b": TENSORS["b"]}),
        made("values", {"a": TENSORS["a"] * 2, "b": TENSORS["b"]}),
        made("more", TENSORS | {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)}),
    ]
    assert len({identity, *others}) == 7
