"""The values and states of one model, as the server knows it."""
