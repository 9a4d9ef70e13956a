"""A family's configuration before weights are read: bounds of numbers, switches, and buffers that follow from it."""
