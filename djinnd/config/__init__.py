"""Configuration: a YAML file, then DJINND_* variables, then flags; later ones win. Read once, and immutable."""

from djinnd.config.schema import Config, Functions, Http, Limits, Model, Quota, Remote, Scheduling
from djinnd.config.show import differing, show
from djinnd.config.sources import ConfigError, Effective, Key, load

__all__ = [
    "Config",
    "ConfigError",
    "Effective",
    "Functions",
    "Http",
    "Key",
    "Limits",
    "Model",
    "Quota",
    "Remote",
    "Scheduling",
    "differing",
    "load",
    "show",
]
