"""Weights: reading checkpoints, the layout of buffers, the host store, and the plan and ring that place blocks."""
