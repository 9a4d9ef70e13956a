"""Benches of captures, edits and breakpoints inside the model."""
