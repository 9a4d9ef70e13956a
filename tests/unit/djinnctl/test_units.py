from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinnctl.units import UNITS, count, duration, parse_size, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (20 << 30, "20.0 GiB"),
        (140 << 30, "140 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (12_345, "12 k"), (4_100_000, "4.1 M"), (13_015_864_320, "13 G")],
)
def test_count(number: int, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (60, "1m00s"), (192, "3m12s"), (3600, "1h00m"), (18_120, "5h02m"), (190_000, "2d04h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 << 30), (" 1.5 MiB ", 3 << 19), ("512B", 512), ("0 KiB", 0), ("2TiB", 2 << 40)],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["4GB", "4", "GiB", "-1GiB", "4gib", "4 GiB more", "", "1e3MiB", "٤GiB "[:-1] + "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number with B, KiB"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back_to_within_what_it_shows(nbytes: int) -> None:
    assert abs(parse_size(size(nbytes)) - nbytes) <= max(nbytes / 19, 0)


@given(st.integers(0, 1 << 60))
def test_every_size_is_short(nbytes: int) -> None:
    assert len(size(nbytes)) <= 12
    assert size(nbytes).split()[1] in UNITS
