"""Benches of an engine without its server: its rate, and the kernels of its steps."""
