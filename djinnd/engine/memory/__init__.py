"""Divides device memory, host memory and disk among weights, workspace and pages."""
