"""Sessions from other machines: djinnd's own frames over TLS, each link on a connection to the daemon"""
