"""The processes that the server starts: engines, the fork server that forks them, and their supervision."""
