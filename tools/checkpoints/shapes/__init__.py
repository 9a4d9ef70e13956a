"""Named shapes: the configurations of checkpoints on the hub, and reduced ones for tests."""
