"""The checksum of a page: XXH3, 64 bits.

It detects pages that are cut short or have decayed. It does not protect against a writer that can change both the bytes
and their checksum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64


def checksum(page: npt.NDArray[np.uint8]) -> int:
    """The checksum of all bytes of a contiguous array, below 2**64. Releases the GIL, unless the page is small."""
    state = xxh3_64()
    state.update(page.data)  # `xxh3_64_intdigest` holds the GIL before xxhash 4
    return state.intdigest()
