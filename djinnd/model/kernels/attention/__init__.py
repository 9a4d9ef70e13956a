"""Attention over paged KV: tokens are written to their pages, and rows of queries read all that they see."""
