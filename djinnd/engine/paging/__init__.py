"""Copies KV pages between device, host and disk while steps run."""
