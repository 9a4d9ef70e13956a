"""Weights of GGUF files: their tensors, and the decoders of their blocks"""
