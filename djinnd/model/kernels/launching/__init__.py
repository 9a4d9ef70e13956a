"""Launches of Triton kernels: their variants, the device's limits, scratch memory, and Triton's interpreter."""
