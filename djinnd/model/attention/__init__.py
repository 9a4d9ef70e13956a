"""Attention over paged KV: two implementations, the worklist of a batch, and the connection to transformers."""
