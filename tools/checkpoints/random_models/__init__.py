"""Checkpoints of a named shape with random weights, laid out and coded as on the hub."""
