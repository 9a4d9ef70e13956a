"""The bench of kernels: their times beside the limits of the device."""
