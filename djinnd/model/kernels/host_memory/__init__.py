"""Kernels that read or write pinned host memory themselves, so that nothing is copied first."""
