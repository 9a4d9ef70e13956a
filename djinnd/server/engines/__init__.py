"""The processes that the server starts: engines, the nursery that forks them, and their supervision."""
