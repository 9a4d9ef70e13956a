"""What every request passes through: a token or the right to do without, a place, its body, one reply."""
