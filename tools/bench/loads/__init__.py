"""Loads of many sessions, drawn before they run, and their figures."""
