"""A transformers model whose work is done by the daemon."""
