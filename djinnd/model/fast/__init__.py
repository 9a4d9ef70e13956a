"""Replaces a family's small operations by kernels whose results are equal to the bit."""
