"""Quotas of users and the accounts of their use: rates, bytes, processor time, latencies."""
