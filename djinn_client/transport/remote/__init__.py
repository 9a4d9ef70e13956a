"""The transport to a daemon of another machine: frames and windows over TLS connections that may break"""
