"""The connection to the daemon: its address, its socket, frames in steps, and windows of shared memory."""
