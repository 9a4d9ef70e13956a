"""Guesses from a small model with the same tokens, or from the checkpoint's own head, which steps then verify."""
