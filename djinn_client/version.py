"""The version of the distribution: daemon, client and djinnctl are released together."""

__version__ = "0.1.0"
