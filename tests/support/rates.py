"""The rates of a device that a test has no need to measure."""

from __future__ import annotations

from djinnd.core.rates import Rates

RATES = Rates(
    bus=50e9,
    memory=4e12,
    reading=4.2e12,
    products={"bfloat16": 5e14, "float16": 5e14, "float32": 5e13},
    launch=4e-6,
)
