"""Requests that look inside a model: edits, breakpoints, and functions of clients."""
