"""Runs any decoder-only family of transformers block by block: its modules, names, layouts and positions."""
