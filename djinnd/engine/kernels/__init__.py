"""Compiles Triton kernels in a process of their own."""
