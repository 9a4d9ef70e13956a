"""Which sessions run in the next step, and whose pages make room for them. Pure decisions: no torch, clock or I/O."""
