"""The formats in which a GGUF file stores numbers: their ids, names and sizes.

A quantised tensor is a sequence of blocks. A block holds a fixed number of weights of one row in a fixed number of
bytes, so a row is a whole number of blocks. The numbers are those of ggml's public specification.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockFormat(NamedTuple):
    """`weights` of a row are stored in `nbytes`. `is_served`: djinnd can decode it."""

    name: str
    weights: int
    nbytes: int
    is_served: bool = False


F32, F16, BF16 = 0, 1, 30

FORMATS: dict[int, BlockFormat] = {
    F32: BlockFormat("F32", 1, 4, True),
    F16: BlockFormat("F16", 1, 2, True),
    2: BlockFormat("Q4_0", 32, 18, True),
    3: BlockFormat("Q4_1", 32, 20, True),
    6: BlockFormat("Q5_0", 32, 22, True),
    7: BlockFormat("Q5_1", 32, 24, True),
    8: BlockFormat("Q8_0", 32, 34, True),
    9: BlockFormat("Q8_1", 32, 40),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144, True),
    13: BlockFormat("Q5_K", 256, 176, True),
    14: BlockFormat("Q6_K", 256, 210, True),
    15: BlockFormat("Q8_K", 256, 292),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136),
    24: BlockFormat("I8", 1, 1),
    25: BlockFormat("I16", 1, 2),
    26: BlockFormat("I32", 1, 4),
    27: BlockFormat("I64", 1, 8),
    28: BlockFormat("F64", 1, 8),
    29: BlockFormat("IQ1_M", 256, 56),
    BF16: BlockFormat("BF16", 1, 2, True),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
    40: BlockFormat("NVFP4", 64, 36),
}

SERVED = ", ".join(each.name for each in FORMATS.values() if each.is_served)

# `general.file_type`: the mixture of formats that the file's maker chose, under which people know the file.
_MIXTURES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}


def mixture(file_type: object) -> str:
    """The name of a `general.file_type`; "" for one that this table lacks."""
    return _MIXTURES.get(file_type, "") if isinstance(file_type, int) else ""


def format_name(number: int) -> str:
    known = FORMATS.get(number)
    return known.name if known is not None else f"format {number}"
