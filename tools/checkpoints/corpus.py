"""The training text: Python's own standard library, as the running interpreter has it."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Not the standard library, or tables and generated text that teach no Python.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "test", "tests", "idlelib", "lib2to3"}
)
HELD_OUT_ONE_IN = 25


@dataclass(frozen=True, slots=True)
class Corpus:
    """Whole files, none of them in both parts."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def standard_library() -> Corpus:
    """Read every distinct UTF-8 source file, in path order; a file's path decides which part it is in."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]) or (text := _read_source(path)) is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            (held_out if _is_held_out(relative) else train).append(text)
    return Corpus(tuple(train), tuple(held_out))


def _read_source(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if text.strip() else None


def _is_held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0


def sample() -> list[str]:
    """A few files, enough to learn a small tokenizer from in well under a second."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [text for path in sorted((root / "asyncio").glob("*.py")) if (text := _read_source(path)) is not None]
