from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinnctl.units import (
    MOST,
    UNITS,
    count,
    duration,
    exact_size,
    interval,
    parse_resident,
    parse_seconds,
    parse_size,
    rate,
    size,
)


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
def test_sizes_are_shown_in_the_largest_fitting_unit(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_an_exact_size_is_read_back(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


def test_an_exact_size_has_the_largest_unit() -> None:
    assert [exact_size(n) for n in (1, 1 << 30, 80 << 30, (1 << 30) + 1024)] == ["1B", "1GiB", "80GiB", "1048577KiB"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (12_345, "12 k"), (4_100_000, "4.1 M"), (13_015_864_320, "13 G")],
)
def test_counts_are_shown_with_three_digits(number: int, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (60, "1m00s"), (192, "3m12s"), (3600, "1h00m"), (18_120, "5h02m"), (190_000, "2d04h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (55.34e9, "55.3 GB/s"),
        (4.229e12, "4.23 TB/s"),
        (999.6e9, "1 TB/s"),
        (712e9, "712 GB/s"),
        (12_000, "12 kB/s"),
        (0.0, "0 B/s"),
    ],
)
def test_rates_are_shown_with_three_digits(per_second: float, text: str) -> None:
    assert rate(per_second, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00085, "0.85 ms"),
        (0.1249, "125 ms"),
        (0.9996, "1 s"),
        (1.6, "1.6 s"),
        (59.9, "59.9 s"),
        (59.97, "59s"),
        (192, "3m12s"),
    ],
)
def test_interval(seconds: float, text: str) -> None:
    assert interval(seconds) == text


@pytest.mark.parametrize(
    ("text", "resident"),
    [("auto", "auto"), ("0", 0), ("29", 29), (str(MOST), MOST), ("0.73", 0.73), (".5", 0.5), ("1.0", 1.0)],
)
def test_resident_blocks(text: str, resident: float | str) -> None:
    assert parse_resident(text) == resident
    assert type(parse_resident(text)) is type(resident)


@pytest.mark.parametrize(
    "text", ["-1", "1.5", "nan", "inf", "73%", "", "all", "1e3", "2.", " 3", str(2**63), "9" * 5000]
)
def test_invalid_numbers_of_blocks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of blocks; write auto, a count as 29"):
        parse_resident(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        (" 1.5 MiB ", 3 << 19),
        ("512B", 512),
        ("0 KiB", 0),
        ("2TiB", 2 << 40),
        ("4G", 4 << 30),
        ("4GB", 4 * 10**9),
        (f"{MOST}B", MOST),
    ],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("5min", 300.0), (" 1.5 h ", 5400.0), ("250ms", 0.25), ("30s", 30.0), ("0", 0.0), ("0s", 0.0)]
)
def test_parse_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["5", "min", "-1s", "5m", "5 min more", "", "1e3s", "nan"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write a number with ms, s, min, h"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["4gb", "4", "GiB", "-1GiB", "4gib", "4 GiB more", "", "1e3MiB", "٤GiB "[:-1] + "x"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number with B, KiB"):
        parse_size(text)


@pytest.mark.parametrize("text", [f"{2**63}B", "8388608TiB", "9" * 400 + "GiB", "9" * 5000 + "B"])
def test_a_size_that_the_wire_cannot_carry(text: str) -> None:
    with pytest.raises(ValueError, match="is too large a size; write less than 8388608TiB"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back_to_within_what_it_shows(nbytes: int) -> None:
    assert abs(parse_size(size(nbytes)) - nbytes) <= max(nbytes / 19, 0)


@given(st.integers(0, 1 << 60))
def test_every_size_is_short(nbytes: int) -> None:
    assert len(size(nbytes)) <= 12
    assert size(nbytes).split()[1] in UNITS
