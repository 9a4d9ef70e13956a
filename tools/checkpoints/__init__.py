"""Checkpoint folders for tests, benchmarks and the shipped model, written by `tools/make_model.py`."""
