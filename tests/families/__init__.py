"""Every causal language model of transformers, reduced, beside transformers: `python -m tests.families.page`."""
