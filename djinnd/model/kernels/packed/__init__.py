"""Kernels that unpack packed weights, or multiply by them (djinn_client.handover.packed has the format)."""
