"""The tuned numbers of a model's step. Each is either measured, with what it gave, or chosen. Launch tables of kernels
stand beside their kernels."""

from __future__ import annotations

import torch

# --- Products of few rows ---------------------------------------------------------------------------------------------

FEW_ROWS = 16  # given by the hardware: rows of the smallest tile that tensor cores multiply
PACKED_ROWS = 8  # measured on an H200 (docs/log): most rows for which a product on the packed form is faster

# --- Products of 16-bit weights on a CPU without instructions for them ------------------------------------------------

# Measured on one core of an AMD EPYC with AVX2, shapes of SmolLM2-135M. 4 rows take 112 ms in bfloat16, and 118 if the
# weights are converted to float32 in parts; 8 rows 205 and 119, 64 rows 1,686 and 423.
NARROW_ROWS = 4  # most rows that torch multiplies as they are
WIDENED_NUMBERS = 1 << 18  # weights in float32 at a time: 1 MiB. Half and twice of it take up to 40 % longer

# Chosen. Most parameters of a bfloat16 checkpoint that is computed in float32 on a CPU unless told otherwise: 128 MiB.
# djinn-tiny takes as long in both. SmolLM2-135M takes 1.5 times as long in float32.
SMALL_PARAMETERS = 1 << 25

# --- Attention of rows with one token, in PyTorch ---------------------------------------------------------------------

# Measured on one and two cores of an AMD EPYC, heads of SmolLM2-135M: 8 rows of 150 tokens take 0.35 ms a block
# together, and 0.81 one by one. With four times as many keys at once, 8 rows of 1,000 take up to twice as long.
LENGTHS_PER_DOUBLING = 4  # a row is padded to one of so many lengths between two powers of two, at most by a quarter
SHORTEST_STEP = 16  # tokens between two such lengths, at least
KEYS_AT_ONCE = 1 << 18  # numbers of the keys that are gathered for one call, unless one row has more

# --- Experts ----------------------------------------------------------------------------------------------------------

# Most pairs of a row and an expert, on average for an expert, and pairs of a tile of products up to there. Measured on
# an H200, Qwen3-30B's experts in bfloat16: with 16 pairs of an expert, tiles of 16, 32 and 64 take 321, 314 and 364 µs
# a block. Tiles of 64 and 128 take 422 and 478 µs with 64 pairs, 609 and 626 with 128, and 976 and 912 with 256. The
# limits between are chosen.
PAIR_TILES = ((8, 16), (24, 32), (160, 64), (1 << 30, 128))
# The same for codes. Measured there: the best tiles of each sweep had 64 pairs.
CODED_TILES = ((8, 16), (1 << 30, 64))
# Measured on an H200, Qwen3-30B's experts in FP8 and MXFP4: with up to so many pairs of an expert, on average, products
# that read codes are faster than decoding first (720 µs and 1,180). More pairs were not measured.
CODED_PAIRS = 128
# Chosen. Most tiles of W that a product of one row loads before it multiplies. On an H200, three such tiles of
# gpt-oss-20b take 35 µs a block, and 47 one after another, which includes fewer instructions a weight.
UNROLLED = 4

# --- CPU beside the bus -----------------------------------------------------------------------------------------------

BESIDE_ROWS = (1, 2, 4, 8, 16)  # chosen: rows for which a load measures the host's products
BESIDE_RUNS = 3  # chosen: measurements of each; their median counts
# Chosen: MLPs that are multiplied by in turns meanwhile. With one, a part of it stays in the cache: beside an H200, the
# host seemed to read 51 and 73 GB/s, and read 36 and 47 in the steps that followed.
BESIDE_SAMPLES = 3
# Chosen: seconds of a product after which no more rows are measured. On a core of an AMD EPYC, torch's product by int8
# codes takes ten times longer in float16 and float32 than in bfloat16, and that by codes of 4 bits forty times.
BESIDE_SLOW_S = 0.2
BESIDE_COPIES_S = 0.3  # chosen: most seconds for which the bus is kept busy meanwhile
BESIDE_GAIN = 0.95  # chosen: the host's share has to make a step at least so much shorter
# Chosen. Cores that the host's products leave to the server and its clients. Beside the bus of an H200, 14 of 16 cores
# read bfloat16 weights for one row at 45 GB/s, and at 60 GB/s without the bus.
SPARE_CORES = 2
# Measured on an AMD EPYC: rows of int8 codes that are brought at once to the order of the product by 4 bits, in 4 bytes
# a weight. 71 million weights take a core 0.33 s, and 0.53 with 1,024 rows: memory is new each time. A multiple of
# 64, as torch orders so many rows together.
ORDERED_ROWS = 512
BESIDE_MEMORY = 0.5  # chosen: most of the host's available memory that copies of MLPs take

# --- Captured graphs --------------------------------------------------------------------------------------------------

# chosen: rows of decode shapes; a step is padded to the next one
DECODE_ROWS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNK_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # chosen: tokens of shapes with chunks
CHUNK_ROWS = (16, 64)  # chosen: rows of shapes with chunks
ROWS_IN_ADVANCE = 64  # chosen: shapes of more rows are captured only when a batch needs them
PADDED_FROM_ROWS = 9  # chosen: fewer rows run as their own shape, as their steps are the shortest
# Steps that a decode shape without graphs runs as a larger one before it is captured, which takes 0.1 s. Measured on an
# H200: 48, 96 and 192 rows of Llama-3.1-8B lose 0.07, 0.3 and 1.0 ms a step, of Qwen3-30B-A3B 0.5, 0.1 and 0.1.
PADDED_STEPS = 256
# Chosen: blocks that are run to compile kernels. The first six are of all kinds that a family has: Gemma 3 has five
# blocks with a window before one without.
KINDS = 6

# --- Results of a step, read by the host ------------------------------------------------------------------------------

NAP_S = 0.0002  # chosen: seconds between two calls of idle work
# Chosen. Share of the last read's duration during which idle work is called. After that the read only waits for the
# event, so that it notices the end at once.
IDLE_SHARE = 0.8

# --- Sampling ---------------------------------------------------------------------------------------------------------

GROUP_LOGITS = 1 << 22  # Chosen. Most logits of rows that are not greedy at once; bounds the device memory of a call.

# --- Latent attention -------------------------------------------------------------------------------------------------

# Chosen. Bytes of keys and values that latent attention makes of earlier tokens at a time. In PyTorch they are in
# float32, and scores count too. The kernels make those of at least one head for a whole session.
EXPANDED_BYTES = 64 << 20
EXPANDED_TOKENS = 4096  # chosen: latents gathered at once; a product of so many fills a GPU
EXPANDED_PAGE = 64  # tokens of a page of expanded keys; tiles of all kernels divide it
# Chosen. Bytes of unfinished results that the kernel over latents may write. They are wide: each split more of the keys
# costs a token heads x rank numbers.
PARTIAL_BYTES = 64 << 20

# --- Adapters ---------------------------------------------------------------------------------------------------------

MAX_RANK = 128  # chosen: the largest rank of an adapter
SLOTS = 64  # chosen: the most adapters of a model that are on the device at once
TILE_TOKENS = 16  # given by the hardware: tokens of the smallest tile that tensor cores multiply

# --- The check at load ------------------------------------------------------------------------------------------------

CHUNKS = (13, 16)  # chosen: tokens of a chunk without history, and of one with history
SINGLES = 11  # chosen: single steps after the chunks
# Chosen. Single steps if each streams the model over the bus, or an earlier engine has checked these weights.
FEW_SINGLES = 3
# Chosen. Allowed error beside what a block adds, and of the logits. On a CPU, two roundings of a block show at most
# 0.001 in 16 bits; a wrong path shows 0.1 to 1. The median over the tokens of a pass counts.
BLOCK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Chosen. Share of the routers' picks in chunks and single steps that one pass over the same tokens has too. The others
# are near ties; a wrong path has a few percent.
SAME_PICKS = 0.6
FP8_TOLERANCE = 8e-2  # chosen: with KV in FP8, where two nearly equal numbers may be rounded apart, by 6 %
# Measured. Allowed ‖ours - theirs‖ / ‖theirs‖ of a token's query, key or value: the same arithmetic in batches of two
# sizes.
POSITION_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CHECKED_BEFORE = 2  # chosen: tokens before a boundary that are checked with it
