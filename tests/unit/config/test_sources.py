from __future__ import annotations

import pytest

from djinn_client.protocol.fields.placing import Placing
from djinnd.config import Config, ConfigError, Functions, Quota, load
from djinnd.config.sources import scalar_keys

ENVIRON = {"XDG_RUNTIME_DIR": "/somewhere", "HOME": "/home/me"}


@pytest.fixture
def configured(tmp_path):
    """Calls load() with a file of the given text."""

    def load_text(text, environ=None, flags=None):
        path = tmp_path / "djinnd.yaml"
        path.write_text(text)
        return load(path, ENVIRON | (environ or {}), flags or {})

    return load_text


@pytest.fixture
def problems(configured, tmp_path):
    """The faults of a configuration, as (place in the file or source, message)."""

    def read(text, **sources):
        with pytest.raises(ConfigError) as caught:
            configured(text, **sources)
        lines = str(caught.value).splitlines()
        return [tuple(line.removeprefix(f"{tmp_path}/").split(": ", 1)) for line in lines]

    return read


def test_memory_for_pages_below_the_device_is_a_size_or_left_to_the_engine(configured):
    models = configured(
        "models: {a: {path: /x, host_kv: 16GiB, disk_kv: 0}, b: {path: /x, host_kv: auto}}"
    ).config.models
    assert [(m.host_kv, m.disk_kv) for m in models.values()] == [(16 << 30, 0), (None, None)]


@pytest.mark.parametrize("text", ["", "# nothing\n", "limits:\nlog:\n"])
def test_without_values_every_setting_has_its_default(configured, text):
    effective = configured(text)
    assert effective.config.limits == Config().limits
    assert effective.config.memory == 0 and effective.config.models == {}
    assert effective.origins == {}


def test_values_of_the_file_are_read(configured):
    effective = configured(
        """
memory: 20GiB
log: {level: debug}
limits:
  session_grace: 5min
models:
  big: {path: /models/big, kv: 1GiB, preload: true}
admins: [0, 1001]
"""
    )
    config = effective.config
    assert config.memory == 20 << 30
    assert config.log.level == "debug" and config.log.format == "text"
    assert config.limits.session_grace == 300
    assert config.models["big"].kv == 1 << 30 and config.models["big"].preload
    assert config.admins == (0, 1001)
    assert effective.origins["memory",].endswith("djinnd.yaml:2")
    assert effective.origins["models", "big", "kv"].endswith("djinnd.yaml:7")


@pytest.mark.parametrize(
    ("text", "placing"),
    [
        ("", Placing()),
        ("resident: auto", Placing()),
        ("resident: 29", Placing(resident=29)),
        ("resident: 1.0", Placing(resident=1.0)),
        ("resident: 0.73\n    packing: off", Placing(resident=0.73, packing=False)),
        ("packing: 'off'\n    prefetch: false", Placing(packing=False, prefetch=False)),
        ("packing: auto\n    keep_host: false", Placing(keep_host=False)),
        ("ring_gb: 20\n    piece: 64MiB", Placing(ring_bytes=20_000_000_000, piece_bytes=64 << 20)),
        ("slots: 4", Placing(slots=4)),
        ("speculation: auto", Placing(speculation=True)),
        ("speculation: off", Placing()),
        ("speculation: {draft: small}", Placing(speculation=True, draft="small")),
        ("part: all", Placing()),
        ("part: heads", Placing(part="heads", resident=1.0)),
        ("part: heads\n    resident: 1.0", Placing(part="heads", resident=1.0)),
        ("cpu_beside_bus: auto", Placing(cpu_beside_bus=True)),
    ],
)
def test_a_model_s_placing_is_read(configured, text, placing):
    made = configured(f"models:\n  big:\n    path: /x\n    {text}\n").config.models["big"].placing
    assert made == placing and type(made.resident) is type(placing.resident)


def test_quotas_keep_the_order_of_the_file_even_if_empty(configured):
    rules = configured(
        "quotas: {z: {sessions: none, tokens_per_s: 5}, none: , "
        "a: {users: [root, 7, ci.b], groups: [0], disk_kv: 1GiB}}"
    ).config.quotas
    assert list(rules.items()) == [
        ("z", Quota(tokens_per_s=5.0)),
        ("none", Quota()),
        ("a", Quota(users=(0, 7, "ci.b"), groups=(0,), disk_kv=1 << 30)),
    ]


def test_functions_have_no_users_by_default_and_their_settings_are_read(configured):
    assert configured("").config.functions == Functions()
    found = configured("functions: {users: [root, 7], groups: [0], seconds: 500ms, memory: 2GiB}").config.functions
    assert found == Functions((0, 7), (0,), 0.5, 2 << 30)


def test_variables_replace_single_values_and_flags_replace_variables(configured):
    effective = configured(
        "memory: 1GiB\nlimits: {sessions: 1, requests: 2}",
        environ={"DJINND_MEMORY": "2GiB", "DJINND_LIMITS_SESSIONS": "7"},
        flags={("memory",): "3GiB", ("device",): None},
    )
    assert effective.config.memory == 3 << 30
    assert (effective.config.limits.sessions, effective.config.limits.requests) == (7, 2)
    assert effective.origins["memory",] == "--memory"
    assert effective.origins["limits", "sessions"] == "DJINND_LIMITS_SESSIONS"


def test_every_single_value_can_be_a_variable(configured):
    names = {"DJINND_" + "_".join(key).upper() for key in scalar_keys()}
    assert {"DJINND_DEVICE", "DJINND_LOG_LEVEL", "DJINND_LIMITS_ENGINE_WAIT", "DJINND_STATE_DIR"} <= names
    assert len(names) == len(list(scalar_keys())), "two keys have one variable"


def test_unknown_variables_are_reported_without_an_error(configured):
    """A cluster may set such variables for a service named djinnd."""
    environ = {"DJINND_PORT": "tcp://10.0.0.1", "DJINND_ADDRESS": "/x", "OTHER": "1"}
    assert configured("", environ=environ).unknown == ["DJINND_PORT"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("devcie: cpu", 1, "unknown key devcie; did you mean device?"),
        (
            "scheduling:\n  slowdown: 1.5",
            2,
            "unknown key scheduling.slowdown; it is a target of each class now: scheduling.interactive.between_tokens",
        ),
        ("\n\nlimits:\n  sesions: 4", 4, "unknown key limits.sesions; did you mean sessions?"),
        ("xyz: 1", 1, "the keys here are device, memory"),
        ("models:\n  big:\n    path: /m\n    dytpe: 1", 4, "unknown key models.big.dytpe; did you mean dtype?"),
        ("memory: 20gib", 1, "the units are B, KiB, MiB, GiB, TiB"),
        ("limits:\n  handshake: 3 days", 2, "limits.handshake: '3 days' is not a time"),
        ("limits:\n  sessions: 0", 2, ">= 1"),
        ("limits:\n  sessions: many", 2, "Expected `int`"),
        ("device: gpu", 1, "cuda:N"),
        ("log:\n  level: loud", 2, "debug, info, warning, error"),
        ("log: loud", 1, "log must have keys and values"),
        ("memory: 1\n\nmemory: 2", 3, "memory is set twice"),
        ("models:\n  a: {path: /x}\n  a: {path: /y}", 3, "models.a is set twice"),
        ("models:\n  a: {dtype: auto}", 2, "models.a has no path"),
        ("models:\n  a: {path: /x, dtype: int8}", 2, "'int8' is not one of auto, float32"),
        (
            "models:\n  a:\n    path: /x\n    resident: -1",
            4,
            "models.a.resident: -1 is not a number of blocks: write auto, a count",
        ),
        ("models:\n  a:\n    path: /x\n    resident: 1.5", 4, "a share from 0.0 to 1.0"),
        ("models:\n  a:\n    path: /x\n    resident: .nan", 4, "nan is not a number of blocks"),
        ("models:\n  a:\n    path: /x\n    resident: true", 4, "True is not a number of blocks"),
        ("models:\n  a:\n    path: /x\n    ring_gb: 4GiB", 4, "'4GiB' is not a number of gigabytes"),
        ("models:\n  a:\n    path: /x\n    ring_gb: .inf", 4, "inf is not a number of gigabytes"),
        ("models:\n  a:\n    path: /x\n    slots: -1", 4, "models.a.slots: Expected `int` >= 0"),
        ("models:\n  a:\n    path: /x\n    packing: on", 4, "True is not one of auto, off"),
        ("models:\n  a:\n    path: /x\n    speculation: often", 4, "'often' is not one of auto, off, {draft: NAME}"),
        ("models:\n  a:\n    path: /x\n    speculation: {model: b}", 4, "names no draft: write it as in {draft: NAME}"),
        ("models:\n  a: {path: /x, part: tail}", 2, "models.a.part: 'tail' is not one of all, heads"),
        ("models:\n  a: {path: /x, part: heads, resident: 0.5}", 2, "a head does not stream, so resident must be"),
        ("models:\n  a: {path: /x, part: heads, speculation: auto}", 2, "a head has no speculation of its own"),
        ("models:\n  a:\n    path: /x\n    keep_host: 1", 4, "Expected `bool`"),
        ("models:\n  a:\n    path: /x\n    piece: 1kb", 4, "the units are B, KiB"),
        ("models:\n  a:\n    path: /x\n    host_kv: 1gib", 4, "the units are B, KiB"),
        ("models:\n  a:\n    path: /x\n    disk_kv: none", 4, "'none' is not a size"),
        ("models:\n  a: {path: /x, piece: 1KiB}", 2, "models.a: piece_bytes is 1,024; it must be 0"),
        ("models:\n  a: {path: /x, slots: 3, ring_gb: 4}", 2, "models.a: the ring is given in bytes and in slots"),
        ("quotas:\n  a:\n    groups: [none-of-this-name]", 3, "no group 'none-of-this-name'"),
        ("quotas:\n  a:\n    users: ['not a name']", 3, "no user 'not a name' on this machine, and 'not a name' is no"),
        ("quotas:\n  a:\n    users: [4294967296]", 3, "no user 4294967296 on this machine"),
        ("functions:\n  users: [ci.bot]", 2, "no user 'ci.bot' on this machine"),
        ("admins: [ci.bot]", 1, "no user 'ci.bot' on this machine"),
        ("quotas:\n  a:\n    users: bob", 3, "Expected `array`"),
        ("quotas:\n  a: {sessions: -1}", 2, "quotas.a.sessions: -1 is not a count"),
        ("quotas:\n  a: {sessions: 1.5}", 2, "1.5 is not a count"),
        ("quotas:\n  a: {device_kv: auto}", 2, "'auto' is not a size"),
        ("quotas:\n  a: {tokens_per_s: 0}", 2, "quotas.a.tokens_per_s: 0 is not a rate"),
        ("quotas:\n  a: {tokens_per_s: .nan}", 2, "nan is not a rate"),
        ("quotas:\n  a: {weight: 0}", 2, "> 0.0"),
        ("quotas:\n  a: {weight: .nan}", 2, "> 0.0"),
        ("quotas:\n  a: {highest_class: first}", 2, "'first' is not one of interactive, agent, batch"),
        ("quotas:\n  a: {tokens: 5}", 2, "unknown key quotas.a.tokens; did you mean tokens_per_s?"),
        ("quotas:\n  a: 5", 2, "quotas.a must have keys and values"),
        ("functions:\n  users: [none-of-this-name]", 2, "no user 'none-of-this-name'"),
        ("functions: {seconds: 0}", 1, "functions: seconds must be more than 0"),
        ("functions: {allow: [root]}", 1, "unknown key functions.allow"),
        ("admins: [0, nobody-of-this-name]", 1, "no user 'nobody-of-this-name'"),
        ("- a\n- b", 1, "the file must have keys and values"),
        ("device: [cpu", 1, "expected ',' or ']'"),
        ("device: !!python/object:os.system x", 1, "could not determine a constructor"),
        ("socket:\n", 1, "socket: None is not a path"),
        ('metrics: "/tmp/a\\0b"', 1, "is not a path"),
        ("admins: " + "[" * 3000 + "]" * 3000, None, "too deeply"),
        ("models:\n  ? [a]\n  : {path: /x}", 2, "models has a key that is not a name"),
        ('models:\n  "": {path: /x}', 2, "models has a key that is not a name"),
        ("memory: 99999999TiB", 1, "is too large: at most 8388608TiB"),
        ("quotas:\n  a: {device_kv: 9223372036854775808}", 2, "is too large"),
        ("quotas:\n  a: {sessions: 99999999999}", 2, "from 0 to 2147483647"),
        ("models:\n  a: {path: /x, max_context: 99999999999999999999}", 2, "max_context"),
        ("models:\n  a: {path: /x, keep_alive: 8761h}", 2, "keep_alive must be at most 8760h"),
        ("limits:\n  session_grace: 999999999h", 2, "is too long: at most 277778h"),
        ("limits: {handshake: 0}", 1, "limits: handshake must be more than 0"),
        ("limits: {engine_start: 0}", 1, "engine_start must be more than 0"),
        ("limits: {engine_silence: 0s}", 1, "engine_silence must be more than 0"),
        ("limits: {request_bytes: 0}", 1, "request_bytes must be at least 64KiB"),
        ("functions: {memory: 0}", 1, "functions: memory must be more than 0"),
        ("functions: {memory: 1025TiB}", 1, "at most 1024TiB"),
    ],
)
def test_each_fault_is_reported_with_its_line(problems, text, line, words):
    ((place, account),) = problems(text)
    assert place == (f"djinnd.yaml:{line}" if line else "djinnd.yaml")
    assert words in account


def test_variables_that_contradict_each_other_are_refused(problems):
    found = problems("", environ={"DJINND_LIMITS_HANDSHAKE": "0"})
    assert found == [("limits", "handshake must be more than 0")]


def test_all_faults_are_reported_at_once(problems):
    found = problems(
        "device: gpu\nmemory: 1gib\nxyz: 1",
        environ={"DJINND_LIMITS_SESSIONS": "x"},
        flags={("log", "level"): "loud"},
    )
    assert {place for place, _ in found} == {
        "djinnd.yaml:1",
        "djinnd.yaml:2",
        "djinnd.yaml:3",
        "DJINND_LIMITS_SESSIONS",
        "--log-level",
    }


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"^[^:]*nowhere\.yaml: No such file or directory$"):
        load(tmp_path / "nowhere.yaml", ENVIRON, {})


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "djinnd.yaml"
    path.write_bytes(b"\xff\xfe\x00device")
    with pytest.raises(ConfigError, match=r"djinnd\.yaml"):
        load(path, ENVIRON, {})


def test_values_are_plain_and_frozen(configured):
    """Values go into messages, so they must have the types of the messages' fields."""
    config = configured("memory: 1KiB\nlimits: {handshake: 1}\ndevice: cpu").config
    assert [type(v) for v in (config.memory, config.limits.handshake, config.device)] == [int, float, str]
    assert [type(v) for v in (Config().memory, Config().limits.request_bytes)] == [int, int]
    with pytest.raises(AttributeError):
        config.memory = 5  # type: ignore[misc]
