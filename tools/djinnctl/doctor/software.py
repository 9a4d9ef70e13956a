"""Python and the packages that djinnd needs, by their metadata: nothing is imported.

The packages are listed here, because djinnd's own metadata tell what a checkout needed when it was installed. After an
update of the checkout they are old, and what is missing since then would not be found.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from djinnctl.doctor.result import Result, fail, ok

Version = tuple[int, ...]

PYTHON: Version = (3, 11)
CLIENT_PACKAGES: dict[str, Version] = {  # the oldest that will do, as in client/pyproject.toml
    "click": (8, 1),
    "cloudpickle": (3, 0),
    "msgspec": (0, 19),
    "xxhash": (3, 4),
}
PACKAGES: dict[str, Version] = {  # as in pyproject.toml
    **CLIENT_PACKAGES,
    "httptools": (0, 6, 4),
    "huggingface_hub": (1, 0),
    "jinja2": (3, 1, 6),
    "llguidance": (1, 9),
    "numpy": (2, 0),
    "posix_ipc": (1, 2),
    "prometheus_client": (0, 22),
    "pyyaml": (6, 0),
    "regex": (2025, 9),
    "safetensors": (0, 6),
    "starlette": (0, 46),
    "tokenizers": (0, 22),
    "torch": (2, 11),
    "transformers": (5, 17),
    "uvicorn": (0, 34),
    "uvloop": (0, 21),
}


def check_python() -> Iterator[Result]:
    yield judge_python(tuple(sys.version_info[:3]))


def has_daemon() -> bool:
    """Whether djinnd is installed in this Python, and not its client alone."""
    return importlib.util.find_spec("djinnd") is not None


def check_packages(*, of_daemon: bool) -> Iterator[Result]:
    """The packages that the daemon needs, or those that its client needs."""
    if not has_daemon():
        yield ok("djinnd", "not installed here: this is its client, for a daemon that runs elsewhere")
    for name, oldest in (PACKAGES if of_daemon else CLIENT_PACKAGES).items():
        try:
            yield judge_package(name, version(name), oldest)
        except PackageNotFoundError:
            yield judge_package(name, None, oldest)


def judge_python(found: Version) -> Result:
    if found < PYTHON:
        return fail("Python", dotted(found), f"install Python {dotted(PYTHON)} or newer and djinnd into it")
    return ok("Python", dotted(found))


def judge_package(name: str, found: str | None, oldest: Version) -> Result:
    wanted = f"'{name}>={dotted(oldest)}'" if oldest else name
    if found is None:
        return fail(name, "not installed", f"pip install {wanted}")
    if parsed(found) < oldest:
        return fail(name, f"{found}, but {dotted(oldest)} or newer is needed", f"pip install --upgrade {wanted}")
    return ok(name, found)


def parsed(text: str) -> Version:
    """The numbers that a version begins with: `2.13.0+cpu` is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))
