"""Attention over paged KV: its kernels, the worklist that they read, and its connection to transformers."""
