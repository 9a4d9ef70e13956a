"""Kernels for a GPU that this machine may not have: listed and compiled, never launched."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from djinnd.model.kernels.launching.launches import Launches, Told, launches
from djinnd.model.kernels.launching.variants import Variant, _source, all_functions

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 << 10  # bytes that a program may use on it
AMPERE = GPUTarget("cuda", 80, 32)


class _Driver:
    """The driver that Triton asks before a launch. Every launch that is not skipped fails."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def refuse_all(variants: Sequence[Variant], told: Told) -> dict[Variant, str]:
    return dict.fromkeys(variants, "no compiler here")


@contextmanager
def hopper(compile_: object = refuse_all, target: GPUTarget = HOPPER) -> Iterator[Launches]:
    """Makes Triton see such a GPU, or `target`, and compile missing kernels by `compile_`."""
    driver = triton.runtime.driver
    driver.set_active(_Driver(target))
    for function in all_functions():
        function.device_caches.clear()  # kernels that earlier tests have compiled
    launches.install(compile_, lambda done, total: None)  # type: ignore[arg-type]
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        driver.set_active(None)


def compile_launches(call: Callable[[], object], target: GPUTarget = HOPPER) -> list[Any]:
    """Compiles what `call` would launch on such a GPU. Its tensors may be on the CPU."""
    module = importlib.import_module(Launches.__module__)
    # Variants in Triton's cache would be launched, and there is no device.
    nothing_compiled = mock.patch.object(module, "is_compiled", return_value=False)
    with nothing_compiled, hopper(target=target) as seen, seen.listing() as listed:
        call()
    sources = [_source(variant, target) for variant in listed]
    return [triton.compile(source, target=target, options=options.__dict__) for source, options in sources]
