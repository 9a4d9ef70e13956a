"""Runs a batch on one model: inputs of the rows, the pass, logits and sampled tokens."""
