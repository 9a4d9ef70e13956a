"""The check at load: a model's results over pages equal the family's own forward. And the rehearsal of kernels."""
