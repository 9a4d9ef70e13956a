"""The guides for users of other tools: their snippets and ours give the same results on djinn-tiny.

Both sides of a page assign their results to the same names. Their side runs in a process of its own, because nnsight
changes every object there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MODEL
from tests.support.daemon import clean_environ
from tests.support.models import tiny_model
from tests.support.snippets import ROOT, snippets

RUN_HERE = "tests/foreign runs this"
WRITE = """
import sys, torch
torch.save({name: globals()[name] for name in sys.argv[2:]}, sys.argv[1])
"""
GUIDES = {  # page: the package of their side, its name for djinn-tiny, and the results that both sides have
    "nnsight": ("nnsight", str(tiny_model()), "hidden logits steered patched lens tokens scaled first second"),
    "transformerlens": (
        "transformer_lens",
        str(tiny_model()),
        "logits hidden attention normalized steered tokens ablated patched lens",
    ),
    "vllm": ("openai", MODEL, "answer streamed verdict vectors"),
    "ollama": ("ollama", MODEL, "answer second streamed raw counted vectors"),
}


@pytest.mark.parametrize("tool", GUIDES)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_both_sides_of_a_guide_give_the_same(
    tool: str, gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, model, names = GUIDES[tool]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    page = f"docs/guide/from-{tool}.md"
    theirs = _of_their_side(page, model, names.split(), gateway.url, tmp_path)

    monkeypatch.setenv("DJINND_ADDRESS", gateway.daemon)
    ours: dict[str, Any] = {}
    for snippet in snippets(page):
        if snippet.elsewhere is None:
            exec(compile(snippet.code, page, "exec"), ours)
    for name in names.split():
        told = f"{name} of {page}: {theirs[name]} there, {ours[name]} here"
        if isinstance(theirs[name], str):
            assert theirs[name] == ours[name], told
        else:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4, msg=told)


def _of_their_side(page: str, model: str, names: list[str], url: str, folder: Path) -> dict[str, Any]:
    """Runs their snippets as one script, because nnsight reads its source. → the values of these names."""
    script, results = folder / "theirs.py", folder / "theirs.pt"
    code = [snippet.code.strip() for snippet in snippets(page, model) if snippet.elsewhere == RUN_HERE]
    script.write_text("\n".join([*code, WRITE]).replace("http://127.0.0.1:8000", url))
    environ = clean_environ() | {"OLLAMA_HOST": url, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    ran = subprocess.run(
        [sys.executable, str(script), str(results), *names],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = torch.load(results)
    return found
