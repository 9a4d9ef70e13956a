"""Benches of calls: overhead of daemon and gateway, decoding, formats, fairness, forecasts."""
