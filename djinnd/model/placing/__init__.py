"""Weights on the device and in host memory: loaders, resident blocks, and the ring of streamed ones."""
