"""Kernels in place of a family's small operations. Their results have the same bits."""
