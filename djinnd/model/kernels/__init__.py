"""Triton kernels of the model's hot path. Importing this needs Triton, which comes with CUDA builds of torch."""

from djinnd.model.kernels.decode import MAX_QUERY, decode
from djinnd.model.kernels.kv_write import kv_write
from djinnd.model.kernels.prefill import prefill
from djinnd.model.kernels.rms_norm import rms_norm
from djinnd.model.kernels.scratch import Scratch
from djinnd.model.kernels.tile import Tiles

__all__ = ["MAX_QUERY", "Scratch", "Tiles", "decode", "kv_write", "prefill", "rms_norm"]
