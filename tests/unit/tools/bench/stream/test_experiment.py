from __future__ import annotations

from pathlib import Path

import pytest

from djinn_client.errors import InvalidRequest
from djinnd.config import load
from tools.bench.stream.experiment import SERVED, Experiment, read, size
from tools.bench.stream.served import MODEL, Serving

CONFIGS = sorted((Path(__file__).resolve().parents[5] / "tools" / "bench" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_daemon_accepts_every_configuration(path: Path, tmp_path: Path) -> None:
    experiment = read(path)
    assert experiment.name == path.stem
    for contender in SERVED:
        serving = Serving(
            "cpu", experiment.memory, {"path": "/m", **experiment.settings_of(contender)}, 512, 16, 2, {1: 16}, 1, True
        )
        (tmp_path / "djinnd.yaml").write_text(serving.config)
        config = load(tmp_path / "djinnd.yaml", {}, {}).config
        assert config.memory == experiment.memory_bytes
        assert config.models[MODEL].packing == (contender == "packed")
        assert config.models[MODEL].prefetch == (contender != "synchronous")


def test_the_yardstick_has_the_same_pages_and_no_ring() -> None:
    experiment = Experiment(name="x", settings={"resident": 29, "slots": 3, "kv": "1GiB"})
    assert experiment.settings_of("resident") == {"kv": "1GiB", "packing": "off"}
    assert experiment.settings_of("packed") == {"resident": 29, "slots": 3, "kv": "1GiB", "packing": "auto"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nmemry: 1GiB\n", "memry"),
        ("name: x\nruns: 0\n", "runs"),
        ("name: x\ncontenders: [vllm]\n", "vllm"),
        ("name: x\nsessions: {0: 1}\n", "sessions"),
        ("name: [\n", "flow node"),
    ],
)
def test_an_error_names_the_fault_of_a_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_sizes_are_read_with_their_units() -> None:
    assert [size(text) for text in ("0", "512MiB", "24GiB", "1.5 GiB")] == [0, 512 << 20, 24 << 30, 3 << 29]
    with pytest.raises(InvalidRequest, match="24 GB"):
        size("24 GB")
