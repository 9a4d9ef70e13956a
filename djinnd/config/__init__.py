"""Configuration: a YAML file, then DJINND_* variables, then flags. Parsed once; frozen after that."""

from djinnd.config.schema import Config, Limits, Log, Model
from djinnd.config.show import show
from djinnd.config.sources import ConfigError, Effective, Key, load
from djinnd.config.units import Device, Seconds, Size, User

__all__ = [
    "Config",
    "ConfigError",
    "Device",
    "Effective",
    "Key",
    "Limits",
    "Log",
    "Model",
    "Seconds",
    "Size",
    "User",
    "load",
    "show",
]
