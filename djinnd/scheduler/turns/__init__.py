"""The order in which sessions are served: classes, fair shares, ageing, and quotas of device pages."""
