"""Checkpoints, the flat buffer of a block, and how its bytes get from files into the arena."""
