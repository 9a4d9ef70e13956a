"""Activations, logits and edits as arrays of numpy or torch, without a copy where the daemon passed a window."""
