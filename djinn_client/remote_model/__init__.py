"""A stand-in for a transformers model: it has the same calls, and the daemon does the work."""
