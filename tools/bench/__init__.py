"""Experiments: one file each, run as `python -m tools.bench.NAME`. They use the client like anybody else."""
