"""Kernels that decode coded weights, or multiply by them (djinnd.weights.forms.coding has the codings)."""
