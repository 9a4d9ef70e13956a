from __future__ import annotations

from typing import Any

import click
import pytest

from tools.bench.serving import forecast
from tools.bench.serving.forecast import Place


def test_a_place_is_read_as_arguments_of_plan_and_load() -> None:
    read = Place().convert("24GiB,kv=2GiB,resident=29,packing=off", None, None)
    assert read == {"memory_bytes": 24 << 30, "kv_bytes": 2 << 30, "resident": 29, "packing": False}
    assert Place().convert("22GiB,resident=0.5", None, None) == {"memory_bytes": 22 << 30, "resident": 0.5}


@pytest.mark.parametrize("text", ["", "24GB", "24GiB,resident", "24GiB,resident=many", "24GiB,packing=no", "24GiB,x=1"])
def test_a_malformed_place_is_refused_with_a_correct_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="24GiB,kv=1GiB"):
        Place().convert(text, None, None)


def test_a_place_has_its_figures_in_the_summary_and_a_row_in_the_table() -> None:
    found: dict[str, Any] = {
        "24 GiB, 29 resident": {
            "blocks": {"plain": 29, "packed": 0, "streamed": 11},
            "streamed_bytes": 5 * 10**9,
            "seconds": {"step of 1": {"foretold": 0.11, "found": 0.1, "off": 0.1}},
            "peak_bytes": 23 << 30,
        }
    }
    told = forecast.summary(found, 50e9)
    assert told == (
        "bus 50.0 GB/s; 24 GiB, 29 resident: step of 1 100.00 ms (foretold 110.00, +10%), 50.0 GB/s, "
        "at most 23.0 GiB in use"
    )
    assert forecast.table("m", found, 50e9).row_count == 1
