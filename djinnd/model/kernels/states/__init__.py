"""Kernels for states: a step of one token in each of many sessions, and chunks of one session's prompt."""
