"""Triton kernels of the model's hot path. Importing one needs Triton, which comes with CUDA builds of torch."""
