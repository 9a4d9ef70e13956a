"""Builds the batch of a step: rows, chunks, pages, and the blocks that each row passes."""
