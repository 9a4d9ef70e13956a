"""Connections to clients: frames and descriptors, the requests under way on each, and shared windows."""
