"""The codes in which checkpoints store matrices in fewer bits, and buffers that keep them so"""
