"""Kernels of stacked experts: a router's picks are grouped, and each picked expert's matrices are read once."""
