"""The tuned numbers of devices. Each is either measured, with what it gave, or chosen. Rates are measured at load."""

from __future__ import annotations

import torch

# --- Budget -----------------------------------------------------------------------------------------------------------

CPU_SHARE = 0.5  # chosen: share of the memory that is available when the engine starts
CUDA_SHARE = 0.9  # chosen: share of the memory that is free when the engine starts
# Measured on an H200: 0.82 GiB. Context, cuBLAS, kernels and captured graphs, outside torch's allocator.
CONTEXT_BYTES = 960 << 20
# Chosen. The part of CONTEXT_BYTES that lies in torch's allocator without a reservation: cuBLAS's workspaces of 32
# MiB a stream, and the unused rest of the allocator's segments.
SLACK_BYTES = 128 << 20

# --- Measurement of rates ---------------------------------------------------------------------------------------------

RATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # given: the dtypes of models
RATE_WIDTH = 4096  # chosen: columns of the matrix that a product with one row reads
RATE_LAUNCHES = 64  # chosen: kernels of a chain
CPU_RATE_BYTES = 32 << 20  # chosen
CPU_RATE_SIDE = 256  # chosen: side of the square matrices
CPU_RATE_RUNS = 3  # chosen
CUDA_RATE_BYTES = 128 << 20  # chosen
CUDA_RATE_SIDE = 4096  # chosen: side of the square matrices
CUDA_RATE_RUNS = 25  # chosen

# --- Pinning of host memory -------------------------------------------------------------------------------------------

# Measured. Threads fill the page tables in small parts, and the driver registers one piece after another once its
# part of the tables is filled. 20 GB that an earlier process left take 1.1 s this way; 16 threads that fill and
# register piece by piece took 2.1 s.
POPULATE_THREADS = 16
POPULATED_BYTES = 64 << 20  # chosen: bytes of a part
# Chosen. Bytes of one madvise call, about a millisecond. The kernel gives no other thread of the process new memory
# during the call.
POPULATED_AT_ONCE = 4 << 20
# Chosen. The driver's lock is not fair: registering pieces back to back would keep steps out until the last piece.
LET_IN_S = 0.001
BUSY_S = 0.1  # chosen: seconds after a step within which a further step is likely
