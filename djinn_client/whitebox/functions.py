"""Pickles functions, which the daemon's intervention process then calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from djinn_client.errors import InvalidRequest

MAX_CODE = 15 << 20  # bytes in one request, whose frame may have 16 MiB
PYTHON = str(sys.implementation.cache_tag)  # byte code is one version's


def code_of(function: Callable[..., Any]) -> bytes:
    """The pickled function with the objects that it refers to. Objects that can be imported there are named only.

    Raises InvalidRequest if it cannot be pickled, or is more than one call can carry."""
    import cloudpickle

    try:
        code: bytes = cloudpickle.dumps(function)
    except Exception as error:  # of whatever it refers to: each has its own
        raise InvalidRequest(f"{function!r} cannot be sent to the daemon: {error}", field="function") from error
    if len(code) > MAX_CODE:
        raise InvalidRequest(
            f"the function takes {len(code):,} bytes with its objects, and one call can carry {MAX_CODE:,}: let "
            "it refer to fewer or smaller tensors, or intervene with local=True",
            field="function",
            bytes=len(code),
            limit=MAX_CODE,
        )
    return code
