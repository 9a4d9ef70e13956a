"""Loads, shares and unloads models, and grants engines the memory for them."""
