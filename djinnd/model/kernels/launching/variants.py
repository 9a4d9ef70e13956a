"""Variant: a kernel for given types, constants, alignments and launch options, and how to compile it.

Triton compiles a variant at its first launch, in the launching thread. That takes seconds, so djinnd describes the
variant as text and compiles it in another process (djinnd/engine/kernels/process.py). The launch finds the result in
Triton's cache on disk. Compiling needs no device.
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
    """The name of a kernel and the specialisation of a launch."""

    module: str
    name: str
    specialization: str  # JSON that Triton passes to its `jit_cache_hook`

    def __str__(self) -> str:
        """The kernel's name, the floating-point types of its pointers, and its integer constants."""
        data = json.loads(self.specialization)
        types = {kind[1:] for kind in data["signature"].values() if str(kind).startswith("*")}
        floats = sorted(types & {"fp32", "fp16", "bf16"})
        names = _kernel(self).arg_names
        values = zip((names[place[0]] for place in data["constant_keys"]), data["constant_vals"], strict=True)
        sizes = [f"{name}={value}" for name, value in values if isinstance(value, int) and value is not False]
        return f"{self.name} ({', '.join([*floats, *sizes])})"


def all_functions() -> list[JITFunction]:
    """All kernels of djinnd.model.kernels, always in the same order."""
    package, folder = str(__package__).rpartition(".")[0], Path(__file__).parent.parent
    files = sorted(path.relative_to(folder).with_suffix("") for path in folder.rglob("[a-z]*.py"))
    modules = [importlib.import_module(".".join((package, *file.parts))) for file in files]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def settle_keys() -> None:
    """Computes the keys of all kernels in Triton's cache, in a fixed order.

    A kernel's key includes the global constants of the functions that it calls, but only of functions that have a key
    already. So the key depends on the order of first launches, and without a fixed order a process would not find the
    variants that another process compiled.
    """
    functions = all_functions()
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        assert function.cache_key  # the property computes the key once and keeps it


def compile_variant(variant: Variant, target: GPUTarget) -> int:
    """Compiles the variant into Triton's cache → bytes of shared memory that a program needs.

    Raises the errors of Triton, LLVM or ptxas if the variant cannot be compiled.
    """
    source, options = _source(variant, target)
    shared: int = triton.compile(source, target=target, options=options.__dict__).metadata.shared
    return shared


def is_compiled(variant: Variant, target: GPUTarget) -> bool:
    """Returns True if Triton's cache has the variant, so that a launch only loads it."""
    source, options = _source(variant, target)
    key = get_cache_key(source, make_backend(target), options, get_cache_invalidating_env_vars())
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return f"{source.name[:150]}.json" in (files.get_group(f"{source.name[:150]}.json") or {})


def _source(variant: Variant, target: GPUTarget) -> tuple[ASTSource, Any]:
    """The source and options that Triton makes of the same launch, so that the key in its cache is equal."""
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
