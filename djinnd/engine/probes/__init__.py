"""Edits and captures of one step: tables of positions, rows on the device, and parked hidden states."""
