"""Chooses the next token of every row on the device: biases, penalties, masks, and random numbers."""
