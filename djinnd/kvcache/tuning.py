"""The tuned numbers of KV pages. Each is either measured, with what it gave, or chosen."""

from __future__ import annotations

# --- Pages ------------------------------------------------------------------------------------------------------------

PAGE_BYTES = 4 << 20  # Measured on PCIe 5: copies of this size reach the bus's full rate. Of all blocks together.
MOST_STATE_TOKENS = 4096  # chosen: tokens of a page with a state; a session that is cut computes up to so many again
FIRST_ROWS = 8  # chosen: rows of a new page table

# --- Copies between device and host -----------------------------------------------------------------------------------

SAVED_S = 0.02  # chosen: seconds of the rate that the bucket may hold
# Chosen. Bytes of urgent pages for one byte of others, so that others are copied however many are urgent.
LEFT_OVER = 8
OWED_BYTES = 64 << 20  # chosen: others go before urgent pages once they are owed this much, one large copy

# --- Host and disk ----------------------------------------------------------------------------------------------------

MAX_SLOTS = 1 << 19  # chosen: a table of 32 MiB
WRITE_OUT_ABOVE = 0.9  # Chosen. Share of the host tier in use, above which its oldest pages are also written to disk.
IN_FLIGHT = 8  # chosen: reads and writes of a page file at a time
KEEP_FREE = 64 << 20  # Chosen. Bytes of the disk for other programs and the journal: below that, no page is written.
KEPT_FILES = 64  # chosen: page files of models that are not loaded
LEAST_FREE = 1 / 8  # Chosen. Share of the disk to keep free, out of the free bytes and the bytes of such files.
