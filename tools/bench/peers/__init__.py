"""Other software that does the same work as djinnd, each in a process of its own."""
