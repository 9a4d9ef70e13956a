"""Recognises files and folders that are no checkpoint that djinnd reads, for error messages. Broken downloads and other
formats of checkpoints are common. An error that names the kind and the remedy saves its reader the search.
"""

from __future__ import annotations

from collections.abc import Iterable

HEAD = 64  # bytes of a file that identify its kind

_LFS = "a git-lfs pointer, not the file itself: fetch that with `git lfs pull`"
_HTML = "an HTML page: what it was downloaded from did not give the file (is a login or a licence missing?)"
_BEGINNINGS = (
    (b"version https://git-lfs", _LFS),
    (b"<!doctype html", _HTML),
    (b"<html", _HTML),
    (b"gguf", "a GGUF file"),
    (b"pk\x03\x04", "a zip archive, such as torch.save writes"),
)


def what_it_is(head: bytes) -> str | None:
    """→ the kind of a file with this beginning; None if it may be of the kind that its name says."""
    if not head:
        return "empty"
    begins = head.lstrip().lower()
    return next((what for beginning, what in _BEGINNINGS if begins.startswith(beginning)), None)


def what_instead(names: Iterable[str]) -> str:
    """→ the kind of a folder with these entries, which has no config.json or no weights that djinnd reads."""
    there = set(names)
    if there & {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}:
        return "it is an adapter (LoRA): merge it into its base model, and load that"
    if any(name.startswith("consolidated") for name in there) or "params.json" in there:
        return "it is a consolidated checkpoint, as Mistral and Meta publish them: convert it to transformers' layout"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in there):
        return "its weights are pickles (.bin, .pt), which are never read: convert them to safetensors"
    if any(name.endswith((".h5", ".msgpack", ".onnx")) for name in there):
        return "its weights are of another framework: convert them to safetensors"
    return "checkpoints in other formats must be converted to safetensors"
