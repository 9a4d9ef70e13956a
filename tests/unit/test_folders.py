"""No folder of the product or its tools grows flat: one folder, one idea."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("djinnd", "djinn_client", "tools")  # djinnctl is in tools
MOST_FILES = 15  # with __init__.py


def test_no_folder_has_more_files_than_one_idea_needs() -> None:
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) for folder in folders}
    assert {"djinnd/engine", "djinn_client/protocol", "tools/djinnctl"} <= counts.keys()
    crowded = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert crowded == {}, f"at most {MOST_FILES} files a folder: divide these into folders with one idea each"
