"""Prepares a loaded model for serving: reserves workspace and KV pool, compiles kernels, and checks the model.

begin ──► compile missing kernels in another process, while other models step ──► check in parts, between the steps of
other models ──► ModelRunner
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from djinn_client.errors import ModelRejected
from djinnd.device import Device
from djinnd.engine.memory.memory import ModelShape, kv_floor, plan_kv, takes_all, workspace_bytes
from djinnd.engine.run.model_runner import ModelRunner, kv_label, workspace_label
from djinnd.messages import Load
from djinnd.model.check.equality import check_paging
from djinnd.model.placing.loader import Weights
from djinnd.model.step.paged_model import PagedModel

if TYPE_CHECKING:  # only CUDA builds of torch bring Triton
    from djinnd.model.kernels.variants import Variant

# Kernels that torch can replace, and how the model's notes describe that. The replacements need the host in each step,
# so such a model runs without graphs.
_REPLACEABLE = {
    "kv_write_kernel": "attention gathers pages",
    "decode_kernel": "attention gathers pages",
    "combine_kernel": "attention gathers pages",
    "mixed_kernel": "attention gathers pages",
    "combine_mixed_kernel": "attention gathers pages",
    "matvec_kernel": "products with few rows are cuBLAS's",
    "few_rows_kernel": "products with few rows are cuBLAS's",
}


class Preparation:
    """The preparation of one model, on the engine's thread, between steps. A failure also gives the weights back."""

    def __init__(
        self, load: Load, weights: Weights, shape: ModelShape, device: Device, max_batch_tokens: int, max_rows: int
    ) -> None:
        """Raises OutOfMemory."""
        self.load = load
        self.weights = weights
        self._device = device
        self._labels: list[str] = []
        try:
            self._reserve(workspace_label(load.model), workspace_bytes(shape, max_batch_tokens))
            floor = kv_floor(shape, load.kv_bytes, device.budget.total)
            assert weights.placement.plan is not None
            greedy = takes_all(load.placing, weights.placement.plan)
            plan = plan_kv(shape, device.budget.free, floor, load.kv_bytes, load.max_context, greedy)
            pool = device.allocate(
                kv_label(load.model),
                (plan.num_pages, shape.num_blocks, 2, plan.page_size, shape.kv_heads, shape.head_dim),
                weights.dtype,
                zero=True,
            )
            self._labels.append(kv_label(load.model))
            model = PagedModel(weights.skeleton, weights.placement, weights.dtype, pool)
            self.runner = ModelRunner(load, weights, model, shape, plan, device, max_batch_tokens, max_rows)
        except BaseException:
            self.abandon()
            raise

    def _reserve(self, label: str, nbytes: int) -> None:
        self._device.budget.reserve(label, nbytes)
        self._labels.append(label)

    def missing_kernels(self) -> list[Variant]:
        """The kernels to compile before `finish`. Only for a CUDA device."""
        from djinnd.model.check.rehearsal import list_kernels

        runner = self.runner
        try:
            return list_kernels(runner.model, runner.max_tokens, runner.plan.max_context)
        except BaseException:
            self.abandon()
            raise

    def kernels_compiled(self, missing: Sequence[Variant], failed: Mapping[Variant, str]) -> None:
        """`failed`: the missing kernels that could not be compiled, with the reason. Raises ModelRejected if torch
        cannot replace one of them."""
        from djinnd.model.kernels.launches import launches

        launches.settle(missing, failed)
        for variant, reason in failed.items():
            if variant.name not in _REPLACEABLE:
                self.abandon()
                told = f"{self.load.model} needs the kernel {variant}, which cannot be compiled here: {reason}"
                raise ModelRejected(told, kernel=variant.name)
        notes = {v.name: f"{_REPLACEABLE[v.name]}, as {v} cannot be compiled: {why}" for v, why in failed.items()}
        self.weights.notes += notes.values()
        if notes:
            self.runner.run_without_graphs()

    def finish(self) -> Iterator[None]:
        """Runs the check at load, then each kernel once. That takes a second or more, in parts of a few milliseconds;
        if the model streams, a part is a pass over the bus.

        The caller may step other models between two parts. `runner` serves after the last part. Raises ModelRejected.
        """
        runner = self.runner
        try:
            yield from check_paging(runner.model, runner.plan.max_context, again=self.weights.is_adopted)
            yield from runner.compile()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Gives back all memory of the model."""
        self.weights.release(self._device)
        for label in self._labels:
            self._device.release(label)
