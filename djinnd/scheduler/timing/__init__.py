"""Predicts how long steps take, from measured ones."""
