"""Calls on the daemon itself, and calls for which it chooses the session."""
