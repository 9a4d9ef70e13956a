"""A daemon's start and end: its socket's path, systemd, and the hand-over to the next daemon."""
