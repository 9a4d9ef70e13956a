"""Reads all sources into one Config. A later source replaces single values of an earlier one.

All faults (unknown keys, wrong units, values out of range) are collected and raised as one ConfigError, with a line for
each fault that names its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import yaml

from djinnd.config.places import default_socket, default_state_dir
from djinnd.config.schema import Config, Scheduling
from djinnd.config.units import unit_of

SYSTEM_FILE = Path("/etc/djinnd/djinnd.yaml")
PREFIX = "DJINND_"
_OTHERS = {"DJINND_ADDRESS", "DJINND_CONFIG", "DJINND_TOKEN"}  # known variables that are not configuration keys

Key = tuple[str, ...]


class ConfigError(Exception):
    """The configuration is wrong. The message has one line for each fault."""


class Setting(NamedTuple):
    """A value as it was written, before conversion to the type of its key."""

    value: Any
    origin: str  # file:line, a variable, a flag
    is_text: bool = False  # True for variables and flags, in which the text "5" may be a number


class Effective(NamedTuple):
    """The configuration, and the origin of its values."""

    config: Config
    origins: dict[Key, str]  # of the values that are not defaults
    unknown: list[str]  # DJINND_ variables without a meaning


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[Key, str | None]) -> Effective:
    """Reads the file at `path` (None: the system's file, if there is one), variables and flags. Raises ConfigError."""
    file = _File(path or SYSTEM_FILE)
    if path is not None or SYSTEM_FILE.exists():
        file.read()
    settings = file.settings | _variables(environ) | _flags(flags)
    problems = file.problems
    values: dict[Key, Any] = {}
    for key, setting in settings.items():
        try:
            values[key] = _convert(setting, _type_of(key))
        except ValueError as error:
            problems.append(f"{setting.origin}: {dotted(key)}: {error}")
    for key, origin in file.sections.items():
        missing = [f.name for f in _fields(_type_of(key)) if f.required and (*key, f.name) not in settings]
        problems += [f"{origin}: {dotted(key)} has no {name}" for name in missing]
    values.setdefault(("socket",), default_socket(environ))
    values.setdefault(("state_dir",), default_state_dir(environ))
    if not values["socket",]:
        problems.append(
            "there is no place for the socket: /run/djinnd cannot be made and $XDG_RUNTIME_DIR is not set; use --socket"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    origins = {key: setting.origin for key, setting in settings.items()}
    return Effective(_build(Config, (), values, file.sections), origins, _unknown(environ))


class _File:
    """One YAML file: its values with their lines, and its faults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[Key, Setting] = {}
        self.sections: dict[Key, str] = {}  # each mapping → file:line
        self.problems: list[str] = []

    def read(self) -> None:
        try:
            loader = yaml.SafeLoader(self.path.read_text())
            root = loader.get_single_node()
            if root is not None:
                self._walk(loader, root, Config, ())
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            self.problems.append(f"{self.path}{line}: {error.problem}")
        except OSError as error:
            self.problems.append(f"{self.path}: {error.strerror}")
        except (ValueError, yaml.YAMLError) as error:
            self.problems.append(f"{self.path}: {error}")
        except RecursionError:
            self.problems.append(f"{self.path}: lists or keys are nested too deeply")

    def _walk(self, loader: yaml.SafeLoader, node: yaml.Node, type_: Any, key: Key) -> None:
        origin = f"{self.path}:{node.start_mark.line + 1}"
        if not _is_section(type_):
            self.settings[key] = Setting(loader.construct_object(node, deep=True), origin)
            return
        self.sections[key] = origin
        if not isinstance(node, yaml.MappingNode):
            if node.tag != "tag:yaml.org,2002:null":  # a key without a value means all defaults
                self.problems.append(f"{origin}: {dotted(key) or 'the file'} must have keys and values")
            return
        for name_node, value in node.value:
            name = str(name_node.value)
            line = f"{self.path}:{name_node.start_mark.line + 1}"
            if not isinstance(name_node, yaml.ScalarNode) or not name:
                self.problems.append(f"{line}: {dotted(key) or 'the file'} has a key that is not a name")
            elif (*key, name) in self.settings or (*key, name) in self.sections:
                self.problems.append(f"{line}: {dotted((*key, name))} is set twice")
            elif (inner := _type_in(type_, name)) is None:
                self.problems.append(f"{line}: unknown key {dotted((*key, name))}{_suggestion(name, type_)}")
            else:
                self._walk(loader, value, inner, (*key, name))


def _variables(environ: Mapping[str, str]) -> dict[Key, Setting]:
    names = {_variable(key): key for key in scalar_keys()}
    return {names[name]: Setting(text, name, is_text=True) for name, text in environ.items() if name in names}


def _flags(flags: Mapping[Key, str | None]) -> dict[Key, Setting]:
    given = {key: text for key, text in flags.items() if text is not None}
    return {key: Setting(text, f"--{'-'.join(key).replace('_', '-')}", is_text=True) for key, text in given.items()}


def _unknown(environ: Mapping[str, str]) -> list[str]:
    known = _OTHERS.union(map(_variable, scalar_keys()))
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def _variable(key: Key) -> str:
    return PREFIX + "_".join(key).upper()


def scalar_keys(type_: Any = Config, key: Key = ()) -> Iterator[Key]:
    """The keys that hold a single value, in the order of the schema. Lists, models and quotas are left out."""
    for f in _fields(type_):
        inner = (*key, f.name)
        if _is_section(f.type):
            yield from scalar_keys(f.type, inner)
        elif get_origin(f.type) is not tuple:
            yield inner


def dotted(key: Key) -> str:
    return ".".join(key)


# --- types ----------------------------------------------------------------------------------------------------------


def _fields(type_: Any) -> Iterable[msgspec.structs.FieldInfo]:
    return () if get_origin(type_) is dict else msgspec.structs.fields(type_)


def _is_section(type_: Any) -> bool:
    return get_origin(type_) is dict or (isinstance(type_, type) and issubclass(type_, msgspec.Struct))


def _type_in(type_: Any, name: str) -> Any:
    """The type of a key of a section; None if the section has no such key."""
    if get_origin(type_) is dict:
        return get_args(type_)[1]
    return next((f.type for f in _fields(type_) if f.name == name), None)


def _type_of(key: Key) -> Any:
    type_: Any = Config
    for name in key:
        type_ = _type_in(type_, name)
    return type_


def _suggestion(name: str, type_: Any) -> str:
    names = [f.name for f in _fields(type_)]
    if type_ is Scheduling and name in ("slowdown", "between_tokens"):
        return "; it is a target of each class now: scheduling.interactive.between_tokens, as 40ms"
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; the keys here are {', '.join(names)}"


def _convert(setting: Setting, type_: Any) -> Any:
    """The setting's value in the type of its key. Raises ValueError."""
    if (unit := unit_of(type_)) is not None:
        return unit.read(setting.value)
    if get_origin(type_) is Literal and setting.value not in get_args(type_):
        raise ValueError(f"{setting.value!r} is not one of {', '.join(get_args(type_))}")
    if get_origin(type_) is tuple and isinstance(setting.value, list):
        return tuple(_convert(setting._replace(value=entry), get_args(type_)[0]) for entry in setting.value)
    return msgspec.convert(setting.value, type_, strict=not setting.is_text)


def _build(type_: Any, key: Key, values: Mapping[Key, Any], sections: Mapping[Key, str]) -> Any:
    """Builds the struct, or the mapping of structs, at `key` from the values below it. Missing values are defaults. A
    mapping keeps the order of the file. Raises ConfigError for values that contradict each other."""
    below = (k for k in (*sections, *values) if len(k) > len(key) and k[: len(key)] == key)
    names = dict.fromkeys(k[len(key)] for k in below)
    inner = {name: (*key, name) for name in names}
    parts = {n: values[k] if k in values else _build(_type_of(k), k, values, sections) for n, k in inner.items()}
    try:
        return parts if get_origin(type_) is dict else type_(**parts)
    except ValueError as error:
        where = f"{sections[key]}: " if key in sections else ""  # otherwise variables or flags set it
        raise ConfigError(f"{where}{dotted(key)}: {error}") from error
