"""Benches, a room for each subject: `python -m tools.bench.ROOM.NAME`. They use the client like any other program."""
