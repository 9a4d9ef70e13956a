"""Launches of kernels that this process has not loaded yet: what happens instead of compiling them on the spot.

    `listing`     the launch is noted and left out, also of a variant that could not be compiled for an earlier model
    otherwise     the variant is in Triton's cache: it is loaded and launched
                  it is not: it is compiled elsewhere meanwhile, and this thread waits
                  it could not be compiled: KernelUnavailable, here and at every later launch

Triton asks its `jit_cache_hook` only when it has no such variant in this process, so other launches cost nothing more.
Without `install`, as in the benches, Triton compiles on the spot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from djinnd.model.kernels.variants import Variant, is_compiled, settle_keys

log = logging.getLogger("djinnd.engine")

Told = Callable[[int, int], None]  # variants done, variants in all
Compile = Callable[[Sequence[Variant], Told], Mapping[Variant, str]]  # → those that could not be compiled, and why


class KernelUnavailable(Exception):
    """This GPU or this compiler cannot have that kernel."""

    def __init__(self, variant: Variant, reason: str) -> None:
        super().__init__(f"the kernel {variant} is not available: {reason}")


UNAVAILABLE = (KernelUnavailable, OutOfResources)  # the second where a kernel wants more than the GPU has


class Launches:
    """One for the process, as Triton's hook is. Lists are of the thread that makes them."""

    def __init__(self) -> None:
        self._compile: Compile | None = None
        self._told: Told = lambda done, total: None
        self._refused: dict[Variant, str] = {}
        self._thread = threading.local()

    def install(self, compile: Compile | None, told: Told = lambda done, total: None) -> None:
        """`compile` compiles variants into Triton's cache, in another process, and returns when that is done; it calls
        `told` meanwhile, where a launch waits that nobody has listed. None: Triton compiles by itself again."""
        settle_keys()
        self._compile, self._told = compile, told
        self._refused.clear()
        triton.knobs.runtime.jit_cache_hook = None if compile is None else self._hook

    def compile(self, variants: Sequence[Variant], told: Told) -> None:
        """Of a list. Returns when they can be launched, but for those that cannot be compiled."""
        assert self._compile is not None, "nothing is listed where Triton compiles by itself"
        self.settle(variants, self._compile(variants, told))

    def settle(self, variants: Sequence[Variant], failed: Mapping[Variant, str]) -> None:
        """These have been compiled; launches of those that `failed` raise KernelUnavailable from now on."""
        for variant in variants:
            self._refused.pop(variant, None)
        self._refused.update(failed)

    @contextmanager
    def listing(self, *, leave_out: bool = True) -> Iterator[dict[Variant, None]]:
        """Lists variants that would have to be compiled: those that this thread launches meanwhile. What they would
        have written is left as it was; with `leave_out` false each such launch raises KernelUnavailable instead."""
        listed: dict[Variant, None] = {}
        self._thread.listed, self._thread.leaves_out = listed, leave_out
        try:
            yield listed
        finally:
            self._thread.listed = None

    def _hook(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Whether Triton is to leave this launch out."""
        variant = Variant(fn.module, fn.name, compile["specialization_data"])
        listed: dict[Variant, None] | None = getattr(self._thread, "listed", None)
        is_listed = listed is not None and variant in listed
        if not is_listed and variant not in self._refused and is_compiled(variant, _target()):
            return False
        if listed is not None:
            listed[variant] = None
            if self._thread.leaves_out:
                return True
            raise KernelUnavailable(variant, "it is not compiled yet")
        if variant in self._refused:
            raise KernelUnavailable(variant, self._refused[variant])
        log.info("kernel_not_listed kernel=%s", variant)
        self.compile([variant], self._told)
        if variant in self._refused:
            raise KernelUnavailable(variant, self._refused[variant])
        return False


def _target() -> GPUTarget:
    target: GPUTarget = triton.runtime.driver.active.get_current_target()
    return target


launches = Launches()
