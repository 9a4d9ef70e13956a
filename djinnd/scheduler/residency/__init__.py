"""Decides which sessions have their KV on the device: eviction, returns from lower tiers, copies or recomputation."""
