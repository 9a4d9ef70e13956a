"""A plugin of pytest for processes in which Triton interprets kernels. Triton's language gets its interpreted functions
once for each file that has kernels. Triton does that anew for each launch and each call of a device function, which
took a third of the processor time.
"""

from __future__ import annotations

from types import FunctionType

from triton.runtime import interpreter

_patch = interpreter._patch_lang
_seen = set[str]()  # the files


def _patch_once(function: FunctionType) -> interpreter._LangPatchScope:
    """→ a scope that restores nothing: all kernels of this process are interpreted."""
    file = function.__globals__["__name__"]
    if file not in _seen:
        _seen.add(file)
        _patch(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
