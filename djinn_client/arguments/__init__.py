"""The keyword arguments of calls, checked and made into requests."""
