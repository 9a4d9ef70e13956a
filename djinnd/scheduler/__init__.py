"""Decides which sessions run in the next step, and which sessions' pages leave the device to make room. Pure: no torch,
clock or I/O."""
