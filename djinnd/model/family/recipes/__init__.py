"""Recipes: how each parameter is made from a checkpoint's tensors, plain, coded, or of a GGUF file."""
