"""Connections to the daemon, a pool for each token."""
