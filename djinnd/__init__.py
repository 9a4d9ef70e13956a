"""djinnd: the operating system of one GPU box."""

from djinn_client.version import __version__

__all__ = ["__version__"]
