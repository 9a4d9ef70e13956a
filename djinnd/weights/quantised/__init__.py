"""Quantised checkpoints in safetensors: which stored tensors make up a matrix, and in which code"""
