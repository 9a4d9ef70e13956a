"""A variant of a kernel: the kernel for given types, constants, alignments and launch options; and how to compile it.

Triton compiles a variant when it is first launched, in the process and the thread that launch it. That takes seconds,
so djinnd describes the variant as text and compiles it in another process (djinnd/engine/kernel_process.py). The
result lies in Triton's cache on disk, where the launch finds it. Compiling needs no device.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

try:
    from triton.runtime.cache import get_cache_invalidating_env_vars
except ImportError:  # up to Triton 3.6 it was in the compiled library
    from triton._C.libtriton import get_cache_invalidating_env_vars


class Variant(NamedTuple):
    """`specialization`: JSON, as Triton gives it to its `jit_cache_hook`."""

    module: str
    name: str
    specialization: str

    def __str__(self) -> str:
        """The kernel, the types of what it reads and writes, and the constants that size it."""
        data = json.loads(self.specialization)
        types = {kind[1:] for kind in data["signature"].values() if str(kind).startswith("*")}
        floats = sorted(types & {"fp32", "fp16", "bf16"})
        names = _kernel(self).arg_names
        values = zip((names[place[0]] for place in data["constant_keys"]), data["constant_vals"], strict=True)
        sizes = [f"{name}={value}" for name, value in values if isinstance(value, int) and value is not False]
        return f"{self.name} ({', '.join([*floats, *sizes])})"


def all_functions() -> list[JITFunction]:
    """Of this package, always in the same order."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def settle_keys() -> None:
    """Gives all our functions their keys in Triton's cache, in one order.

    The key of a function takes in the global constants of the functions that it calls, but only of those that have a
    key already. So it depends on what a process launched first, and one process would not find what another compiled.
    """
    functions = all_functions()
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        assert function.cache_key  # computed once, and kept


def compile_variant(variant: Variant, target: GPUTarget) -> int:
    """Compiles it into Triton's cache. → bytes of shared memory that a program of it needs.

    Raises whatever Triton, LLVM or ptxas raise where it cannot be compiled."""
    source, options = _source(variant, target)
    shared: int = triton.compile(source, target=target, options=options.__dict__).metadata.shared
    return shared


def is_compiled(variant: Variant, target: GPUTarget) -> bool:
    """Whether Triton's cache has it, so that a launch only has to load it."""
    source, options = _source(variant, target)
    key = get_cache_key(source, make_backend(target), options, get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return f"{source.name[:150]}.json" in (files.get_group(f"{source.name[:150]}.json") or {})


def _source(variant: Variant, target: GPUTarget) -> tuple[ASTSource, Any]:
    """What Triton makes of a launch, and so the same key in its cache."""
    data = json.loads(variant.specialization)
    constants = dict(zip(map(tuple, data["constant_keys"]), data["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, data["attrs_keys"]), data["attrs_vals"], strict=True))
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in data["options"].items()}
    source = ASTSource(_kernel(variant), data["signature"], constants, attributes)
    return source, make_backend(target).parse_options(given)


def _kernel(variant: Variant) -> JITFunction:
    kernel = getattr(importlib.import_module(variant.module), variant.name)
    assert isinstance(kernel, JITFunction)
    return kernel
