"""Runs on the meta device that learn a family's points, KV, states and own weights."""
