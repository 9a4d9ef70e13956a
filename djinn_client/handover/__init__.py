"""Hand-off of weights, KV and whole sessions between a program and the daemon."""
