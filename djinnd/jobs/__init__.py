"""The messages between the daemon's processes and their confined children. No code of the children, no I/O."""
