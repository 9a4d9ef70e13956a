"""Triton kernels of the model's hot path. Importing this needs Triton, which comes with CUDA builds of torch."""

from djinnd.model.kernels.decode import MAX_QUERY, decode, fits_decode
from djinnd.model.kernels.edit import edit
from djinnd.model.kernels.fetch import fetch_packed, fetch_plain
from djinnd.model.kernels.few_rows import few_rows
from djinnd.model.kernels.gate import gated
from djinnd.model.kernels.kv_write import kv_write
from djinnd.model.kernels.launches import UNAVAILABLE
from djinnd.model.kernels.matvec import matvec
from djinnd.model.kernels.mixed import mixed
from djinnd.model.kernels.packed_product import packed_product, product_fits
from djinnd.model.kernels.rms_norm import rms_norm
from djinnd.model.kernels.rope import rope
from djinnd.model.kernels.scratch import Scratch
from djinnd.model.kernels.tile import Tiles
from djinnd.model.kernels.unpack import unpack

__all__ = [
    "MAX_QUERY",
    "UNAVAILABLE",
    "Scratch",
    "Tiles",
    "decode",
    "edit",
    "fetch_packed",
    "fetch_plain",
    "few_rows",
    "fits_decode",
    "gated",
    "kv_write",
    "matvec",
    "mixed",
    "packed_product",
    "product_fits",
    "rms_norm",
    "rope",
    "unpack",
]
