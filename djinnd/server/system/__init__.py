"""Wrappers of the operating system: peers of sockets, descriptors, files, and shared memory."""
