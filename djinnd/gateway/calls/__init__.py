"""Calls of the daemon that several APIs make in the same way."""
