"""The files that are shipped with the code: wheels, systemd units, example configuration, and the Makefile's checks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import msgspec
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from djinn_client import __version__
from djinnd.config import Config, Model, Quota, load
from djinnd.config.places import SYSTEM_SOCKET, SYSTEM_STATE
from djinnd.config.sources import scalar_keys

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())
OF_THE_CLIENT = ("djinn_client", "tools/djinnctl")

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class TestWheel:
    """The wheel of the daemon."""

    @pytest.fixture(scope="class")
    @staticmethod
    def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
        yield from _built(ROOT, tmp_path_factory.mktemp("wheel"))

    def test_has_the_package_and_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {"djinnd", f"djinnd-{__version__}.dist-info"}

    def test_has_every_module(self, wheel: zipfile.ZipFile) -> None:
        assert _modules("djinnd") <= set(wheel.namelist())

    def test_has_the_small_model_in_at_most_8_mb(self, wheel: zipfile.ZipFile) -> None:
        sizes = {file.filename: file.file_size for file in wheel.infolist() if "/models/djinn-tiny/" in file.filename}
        names = {name.rsplit("/", 1)[1] for name in sizes}
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
        assert sum(sizes.values()) <= 8_000_000

    def test_has_the_command_and_the_version_of_the_code(self, wheel: zipfile.ZipFile) -> None:
        commands = wheel.read(f"djinnd-{__version__}.dist-info/entry_points.txt").decode()
        assert "djinnd = djinnd.__main__:main" in commands.splitlines()
        metadata = _metadata(wheel, "djinnd")
        assert (metadata["Name"], metadata["Version"]) == ("djinnd", __version__)

    def test_asks_for_the_client_of_its_own_version(self, wheel: zipfile.ZipFile) -> None:
        assert f"djinn-client=={__version__}" in _metadata(wheel, "djinnd").get_all("Requires-Dist", [])


class TestClientWheel:
    @pytest.fixture(scope="class")
    @staticmethod
    def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
        yield from _built(ROOT / "client", tmp_path_factory.mktemp("client-wheel"))

    def test_has_the_two_packages_and_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {"djinn_client", "djinnctl", f"djinn_client-{__version__}.dist-info"}

    def test_has_every_module(self, wheel: zipfile.ZipFile) -> None:
        assert _modules(*OF_THE_CLIENT) <= set(wheel.namelist())

    def test_has_the_command_and_the_version_of_the_code(self, wheel: zipfile.ZipFile) -> None:
        commands = wheel.read(f"djinn_client-{__version__}.dist-info/entry_points.txt").decode()
        assert "djinnctl = djinnctl.cli:main" in commands.splitlines()
        metadata = _metadata(wheel, "djinn_client")
        assert (metadata["Name"], metadata["Version"]) == ("djinn-client", __version__)

    def test_types_are_for_callers_too(self, wheel: zipfile.ZipFile) -> None:
        assert "djinn_client/py.typed" in wheel.namelist()

    def test_has_the_licence(self) -> None:
        assert (ROOT / "client" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()

    def test_its_sources_can_be_built_without_the_checkout(self, tmp_path: Path) -> None:
        """A link to a file outside the archive would be left dangling."""
        with tarfile.open(next(SdistBuilder(str(ROOT / "client")).build(directory=str(tmp_path)))) as sources:
            members = {member.name.partition("/")[2] for member in sources if member.isfile()}
        assert {"pyproject.toml", "LICENSE", "README.md", "djinn_client/api/client.py", "djinnctl/cli.py"} <= members


class TestDependencies:
    """Every imported package is declared as a dependency."""

    def test_the_daemon_s_imports_are_declared(self) -> None:
        """triton is not declared: only the kernels need it, and every CUDA build of torch brings it."""
        assert _imported("djinnd") <= _declared(PYPROJECT["project"]["dependencies"]) | {"triton", "djinn_client"}

    def test_the_client_s_imports_are_declared(self) -> None:
        """torch, transformers and triton are not declared: the client imports them only if they are installed, to share
        a model, to be called as one of transformers, or to examine a machine."""
        project = CLIENT["project"]
        declared = _declared(project["dependencies"]).union(*map(_declared, project["optional-dependencies"].values()))
        assert _imported(*OF_THE_CLIENT) - {"torch", "transformers", "triton"} <= declared

    def test_shared_dependencies_have_equal_versions(self) -> None:
        daemon, client = (set(project["project"]["dependencies"]) for project in (PYPROJECT, CLIENT))
        shared = _declared(daemon) & _declared(client)
        assert {line for line in daemon if _declared([line]) <= shared} == {
            line for line in client if _declared([line]) <= shared
        }

    def test_the_client_brings_neither_torch_nor_numpy(self) -> None:
        assert not {"torch", "transformers", "numpy"} & _declared(CLIENT["project"]["dependencies"])


class TestLayers:
    def test_every_part_of_djinnd_has_its_layer(self) -> None:
        """A package that is missing in the contract could import anything."""
        contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
        layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
        named = {name.strip() for layer in layers for name in layer.split("|")}
        files = {file.stem for file in (ROOT / "djinnd").glob("*.py") if file.stem != "__init__"}
        packages = {folder.parent.name for folder in (ROOT / "djinnd").glob("*/__init__.py")}
        assert {f"djinnd.{part}" for part in files | packages} == {name for name in named if name.startswith("djinnd.")}


@needs_systemd
class TestUnits:
    @pytest.fixture
    @staticmethod
    def folder(tmp_path: Path) -> Path:
        """The units as installed, with a program in its place, since systemd requires that it exists."""
        program = tmp_path / "djinnd"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for name in ("djinnd.service", "djinnd.socket"):
            unit = (ROOT / "systemd" / name).read_text()
            (tmp_path / name).write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={program}", unit, flags=re.MULTILINE))
        return tmp_path

    def test_systemd_finds_nothing_to_complain_of(self, folder: Path) -> None:
        units = ["./djinnd.service", "./djinnd.socket"]
        verified = subprocess.run(["systemd-analyze", "verify", *units], cwd=folder, capture_output=True, text=True)
        assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")

    def test_exposure_is_at_most_3(self, folder: Path) -> None:
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "./djinnd.service"]
        judged = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert judged.returncode == 0, judged.stdout


class TestExampleConfiguration:
    EXAMPLE = ROOT / "systemd" / "djinnd.yaml"

    @pytest.fixture
    @staticmethod
    def defaults(tmp_path: Path) -> Config:
        empty = tmp_path / "empty.yaml"
        empty.write_text("")
        return load(empty, {}, {}).config

    def test_is_accepted_and_changes_nothing_but_the_hub(self, defaults: Config) -> None:
        assert load(self.EXAMPLE, {}, {}).config == msgspec.structs.replace(defaults, hub=False)

    def test_has_every_key_with_its_default(self, tmp_path: Path, defaults: Config) -> None:
        """A comment begins with `# `; a disabled setting begins with `#` alone, or is indented further."""
        uncommented = tmp_path / "djinnd.yaml"
        uncommented.write_text(re.sub(r"^#(?! \S|$)", "", self.EXAMPLE.read_text(), flags=re.MULTILINE))
        effective = load(uncommented, {}, {})
        assert set(effective.origins) >= {*scalar_keys(), ("admins",)}
        model, quota = effective.config.models["llama"], effective.config.quotas["everybody"]
        written = uncommented.read_text()
        assert {name for *_, name in effective.origins} >= {*Model.__struct_fields__} - {"adapters"}
        assert "adapters: {}" in written  # an empty mapping has no origin
        assert {name for *_, name in effective.origins} >= {*Quota.__struct_fields__}
        assert (model, quota) == (Model(path=model.path), Quota())
        shown = {"socket": str(SYSTEM_SOCKET), "state_dir": str(SYSTEM_STATE)}
        shown |= {"hub": False, "models": {"llama": model}, "quotas": {"everybody": quota}}
        assert effective.config == msgspec.structs.replace(defaults, **shown)


@needs_make
class TestFirstWords:
    """On a machine that lacks a requirement, `make` prints one line with the remedy and makes no environment."""

    def make(self, folder: Path, python: str) -> str:
        target = folder / "venv" / "bin" / "python"
        command = ["make", "--silent", f"VENV={folder / 'venv'}", f"PYTHONS={python}", str(target)]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert made.returncode != 0
        assert not (folder / "venv").exists()
        return next(line for line in made.stderr.splitlines() if not line.startswith("make"))

    def test_no_python(self, tmp_path: Path) -> None:
        assert "needs Python 3.11 or newer" in self.make(tmp_path, "no-such-python")

    def test_an_old_python(self, tmp_path: Path) -> None:
        assert "needs Python 3.11 or newer" in self.make(tmp_path, self.python(tmp_path, "exit 1"))

    def test_no_venv_module(self, tmp_path: Path) -> None:
        python = self.python(tmp_path, 'case "$2" in *ensurepip*) exit 1;; esac')
        assert "has no venv module: install it" in self.make(tmp_path, python)

    def python(self, folder: Path, body: str) -> str:
        program = folder / "python3"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return str(program)


def _built(project: Path, folder: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(next(WheelBuilder(str(project)).build(directory=str(folder)))) as wheel:
        yield wheel


def _metadata(wheel: zipfile.ZipFile, name: str) -> Message:
    return Parser().parsestr(wheel.read(f"{name}-{__version__}.dist-info/METADATA").decode())


def _modules(*packages: str) -> set[str]:
    """The files of the packages, with their names in a wheel."""
    files = {str(file.relative_to(ROOT)) for package in packages for file in (ROOT / package).rglob("*.py")}
    return {file.removeprefix("tools/") for file in files}


def _declared(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0] for line in requirements}


def _imported(*packages: str) -> set[str]:
    """The distributions that the packages import, without themselves and the standard library."""
    names = {"yaml": "pyyaml"}
    imported = {name for package in packages for name in _imports(ROOT / package)}
    foreign = imported - {Path(package).name for package in packages} - sys.stdlib_module_names
    return {names.get(name, name) for name in foreign}


def _imports(folder: Path) -> Iterator[str]:
    """The top-level names that the modules import, at any depth of their code."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]
