"""Measured results: the raw files in docs/results, and docs/results.md, which is generated from them."""
