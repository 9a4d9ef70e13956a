"""Launches: handles the first launch of a kernel variant in this process, so that Triton never compiles in the engine.

    within `listing`       the launch is noted and skipped, even if the variant could not be compiled for another model;
    in Triton's cache      the variant is loaded and launched;
    not in the cache       another process compiles the variant while this thread waits;
    cannot be compiled     KernelUnavailable, at this launch and at each later one.

Triton calls its `jit_cache_hook` only for a variant that is new to the process, so other launches cost nothing extra.
Without `install`, as in the benchmarks, Triton compiles in this process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

from djinnd.model.kernels.launching.variants import Variant, is_compiled, settle_keys

log = logging.getLogger("djinnd.engine")

Told = Callable[[int, int], None]  # variants done, variants in all
Compile = Callable[[Sequence[Variant], Told], Mapping[Variant, str]]  # → variants that cannot be compiled, and why


class KernelUnavailable(Exception):
    """The kernel cannot be compiled for this GPU by this compiler."""

    def __init__(self, variant: Variant, reason: str) -> None:
        super().__init__(f"the kernel {variant} is not available: {reason}")


UNAVAILABLE = (KernelUnavailable, OutOfResources)  # the second: the kernel needs more resources than the GPU has


class Launches:
    """The process's hook for new variants. There is one, as Triton has one hook. A listing concerns only its thread."""

    def __init__(self) -> None:
        self._compile: Compile | None = None
        self._told: Told = lambda done, total: None
        self._refused: dict[Variant, str] = {}
        self._thread = threading.local()

    def install(self, compile: Compile, told: Told) -> None:
        """Sets the function that compiles variants into Triton's cache in another process.

        compile: returns when the variants are compiled.
        told: receives the progress when a launch waits for a variant that was not listed before.
        """
        settle_keys()
        self._compile, self._told = compile, told
        self._refused.clear()
        triton.knobs.runtime.jit_cache_hook = self._hook

    def compile(self, variants: Sequence[Variant], told: Told) -> None:
        """Compiles listed variants. Afterwards they can be launched, except for those that cannot be compiled."""
        assert self._compile is not None, "compile is called only for variants listed after install"
        self.settle(variants, self._compile(variants, told))

    def settle(self, variants: Sequence[Variant], failed: Mapping[Variant, str]) -> None:
        """Notes that these variants have been compiled. Launches of a variant in `failed` raise KernelUnavailable."""
        for variant in variants:
            self._refused.pop(variant, None)
        self._refused.update(failed)

    @property
    def is_listing(self) -> bool:
        """True for a thread within `listing`. A launch may then leave its outputs as they were allocated."""
        return getattr(self._thread, "listed", None) is not None

    @contextmanager
    def listing(self, *, leave_out: bool = True) -> Iterator[dict[Variant, None]]:
        """Collects the variants that this thread launches in the context and that need compiling. Such a launch is
        skipped and writes nothing; if `leave_out` is false, it raises KernelUnavailable."""
        listed: dict[Variant, None] = {}
        self._thread.listed, self._thread.leaves_out = listed, leave_out
        try:
            yield listed
        finally:
            self._thread.listed = None

    def _hook(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Called by Triton for a variant that is new to the process. Returns True if Triton should skip the launch."""
        variant = Variant(fn.module, fn.name, compile["specialization_data"])
        listed: dict[Variant, None] | None = getattr(self._thread, "listed", None)
        is_listed = listed is not None and variant in listed
        target = triton.runtime.driver.active.get_current_target()
        if not is_listed and variant not in self._refused and is_compiled(variant, target):
            return False
        if listed is not None:
            listed[variant] = None
            if self._thread.leaves_out:
                return True
            raise KernelUnavailable(variant, "it is not compiled yet")
        if variant in self._refused:
            raise KernelUnavailable(variant, self._refused[variant])
        log.info("kernel_not_listed kernel=%s", str(variant))
        self.compile([variant], self._told)
        if variant in self._refused:
            raise KernelUnavailable(variant, self._refused[variant])
        return False


launches = Launches()
