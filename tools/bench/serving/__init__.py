"""Benches of calls: overhead of daemon and gateway, other machines, decoding, formats, fairness, forecasts."""
