"""The scheduler in virtual time: loads on a simulated machine."""
