"""Attention over paged KV, and the worklist that its kernels read."""
