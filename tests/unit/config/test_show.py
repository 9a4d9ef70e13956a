from __future__ import annotations

import re
from pathlib import Path

import yaml

from djinnd.config import Model, Quota, load, show

ROOT = Path(__file__).parents[3]
ENVIRON = {"XDG_RUNTIME_DIR": "/somewhere"}
TEXT = """
memory: 20GiB
limits: {session_grace: 90s, handshake: 250ms}
log: {level: warning}
models:
  'odd: name': {path: "/models/a b", kv: 1MiB}
  plain: {path: org/name}
  count: {path: org/name, resident: 29, slots: 4, packing: auto, speculation: auto, prefetch: false}
  share: {path: org/name, resident: 0.73, ring_gb: 4.5, packing: off, keep_host: false, piece: 64MiB}
  all: {path: org/name, resident: auto, host_kv: auto, disk_kv: 0}
  drafted: {path: org/name, speculation: {draft: plain}}
  headed: {path: org/name, part: heads}
  tiers: {path: org/name, host_kv: 16GiB, disk_kv: 1TiB}
quotas:
  'odd: rule': {users: [0, 7], groups: [0], weight: 2.5, highest_class: agent, sessions: 4, tokens_per_s: 500}
  memory: {device_kv: 4GiB, host_kv: none, disk_kv: 0}
  others:
admins: [0, 7]
"""


def test_the_shown_configuration_can_be_read_again(tmp_path):
    first = tmp_path / "first.yaml"
    first.write_text(TEXT)
    effective = load(first, ENVIRON, {})
    second = tmp_path / "second.yaml"
    second.write_text(show(effective))
    assert load(second, ENVIRON, {}).config == effective.config


def test_each_value_has_its_origin(tmp_path):
    path = tmp_path / "first.yaml"
    path.write_text(TEXT)
    lines = show(load(path, ENVIRON | {"DJINND_DEVICE": "cpu"}, {("log", "format"): "json"})).splitlines()
    origins = {line.split("#")[0].strip(): line.split("#")[1].strip() for line in lines if "#" in line}
    assert origins["memory: 20GiB"] == f"{path}:2"
    assert origins["device: cpu"] == "DJINND_DEVICE"
    assert origins["format: json"] == "--log-format"
    assert origins["requests: 4096"] == "default"


def test_the_example_file_shows_every_key_with_its_default(tmp_path):
    """In the example file, a commented key has no space, or at least two, after #; prose has one."""
    text = (ROOT / "systemd" / "djinnd.yaml").read_text()
    keys = "\n".join(re.findall(r"^#((?:  +)?[a-z].*)$", text, re.MULTILINE))
    example, empty = tmp_path / "djinnd.yaml", tmp_path / "empty.yaml"
    example.write_text(keys)
    empty.write_text("")
    written, plain = load(example, ENVIRON, {}).config, load(empty, ENVIRON, {}).config
    for name in ("device", "memory", "log", "limits", "scheduling", "functions", "http", "metrics", "admins"):
        assert getattr(written, name) == getattr(plain, name)
    shown = yaml.safe_load(show(load(empty, ENVIRON, {})))
    assert set(yaml.safe_load(keys)) == set(shown) - {"hub"}, "the service's file sets that one"
    assert set(yaml.safe_load(keys)["limits"]) == set(shown["limits"])
    for section in ("scheduling", "functions"):
        assert set(yaml.safe_load(keys)[section]) == set(shown[section])
    assert set(yaml.safe_load(keys)["models"]["llama"]) == set(Model.__struct_fields__)
    assert set(yaml.safe_load(keys)["quotas"]["everybody"]) == set(Quota.__struct_fields__)
    assert written.quotas == {"everybody": Quota()}
