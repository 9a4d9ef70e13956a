"""Benches of KV that leaves the device and comes back, and of sessions that outlive their engine."""
