"""Kernels of stacked experts: routers' picks are found and grouped, and each picked expert's matrices are read once."""
