"""How the bytes of a page are known to be the ones that were written: XXH3, 64 bits.

It finds what was cut short or has decayed. It is no protection against whoever may write the bytes and their checksum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64


def checksum(page: npt.NDArray[np.uint8]) -> int:
    """Below 2**64, of all bytes of a contiguous array. Other threads run meanwhile, if the page is not a small one."""
    state = xxh3_64()
    state.update(page.data)  # `xxh3_64_intdigest` keeps the GIL before xxhash 4
    return state.intdigest()
