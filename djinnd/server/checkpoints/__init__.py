"""Checkpoints by their names: configured models, folders, downloads, and the inspection of unknown ones."""
