from __future__ import annotations

import grp
import os
import pwd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinnd.config.units import (
    LimitCount,
    LimitRate,
    LimitSize,
    read_device,
    read_group,
    read_seconds,
    read_size,
    read_user,
    unit_of,
    write_seconds,
    write_size,
)


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [(0, 0), (4096, 4096), ("4096", 4096), ("1KiB", 1 << 10), ("20 GiB", 20 << 30), ("0.5MiB", 1 << 19), ("7B", 7)],
)
def test_a_size_is_read_in_bytes(written, bytes_):
    assert read_size(written) == bytes_


@pytest.mark.parametrize(("written", "size"), [("20G", 20 << 30), ("1.5K", 1536), ("20GB", 20 * 10**9)])
def test_other_units_of_size_are_read_as_systemd_and_makers_of_disks_write_them(written, size):
    assert read_size(written) == size


@pytest.mark.parametrize(
    "written", ["20gb", "20g", "20gib", "GiB", "-1GiB", -1, "1.5B", "", None, True, [1], "1 2KiB", "nan"]
)
def test_the_error_for_a_bad_size_says_how_to_write_one(written):
    with pytest.raises(ValueError, match=r"GiB|whole number"):
        read_size(written)


@pytest.mark.parametrize("written", [1 << 63, "8388608TiB", "9" * 400 + "GiB", "9" * 400 + ".0GiB"])
def test_a_size_that_does_not_fit_a_message_is_refused(written):
    with pytest.raises(ValueError, match="is too large"):
        read_size(written)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_written_size_is_read_back(count):
    assert read_size(write_size(count)) == count


@pytest.mark.parametrize(
    ("written", "seconds"), [(5, 5), (0.5, 0.5), ("250ms", 0.25), ("30s", 30), ("10min", 600), ("2 h", 7200)]
)
def test_a_time_is_read_in_seconds(written, seconds):
    assert read_seconds(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["3 days", "1m", "-5s", "soon", None, True])
def test_a_bad_time_is_refused(written):
    with pytest.raises(ValueError, match="time"):
        read_seconds(written)


@pytest.mark.parametrize("written", [1e10, "9" * 400 + "h", "9" * 309 + ".0h", "277778h", float("inf")])
def test_a_time_that_is_too_long_is_refused(written):
    with pytest.raises(ValueError, match=r"is too long|is not a time"):
        read_seconds(written)


@given(st.integers(min_value=0, max_value=10**9))
def test_a_written_time_is_read_back(milliseconds):
    assert read_seconds(write_seconds(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


def test_users_are_read_by_name_and_number():
    name = pwd.getpwuid(os.getuid()).pw_name
    assert read_user(name) == os.getuid()
    assert read_user(4711) == 4711


@pytest.mark.parametrize("written", ["nobody-of-this-name", -1, 1.5, None, True])
def test_an_unknown_user_is_refused(written):
    with pytest.raises(ValueError, match="no user"):
        read_user(written)


def test_groups_are_read_by_name_and_number():
    name = grp.getgrgid(os.getgid()).gr_name
    assert read_group(name) == os.getgid()
    assert read_group(4711) == 4711


@pytest.mark.parametrize("written", ["none-of-this-name", -1, 1.5, None, True])
def test_an_unknown_group_is_refused(written):
    with pytest.raises(ValueError, match="no group"):
        read_group(written)


@pytest.mark.parametrize(
    ("limit", "written", "kept"),
    [
        (LimitSize, "4GiB", 4 << 30),
        (LimitSize, 0, 0),
        (LimitCount, 0, 0),
        (LimitCount, 8, 8),
        (LimitRate, 500, 500.0),
        (LimitRate, 0.5, 0.5),
        *((limit, "none", None) for limit in (LimitSize, LimitCount, LimitRate)),
    ],
)
def test_a_limit_may_be_none(limit, written, kept):
    unit = unit_of(limit)
    assert unit.read(written) == kept
    assert unit.read(unit.write(kept)) == kept


@pytest.mark.parametrize("limit", [LimitSize, LimitCount, LimitRate])
@pytest.mark.parametrize("written", ["auto", "", None, True, -1, float("nan"), float("inf"), "8 of them"])
def test_a_bad_limit_is_refused(limit, written):
    with pytest.raises(ValueError, match="is no"):
        unit_of(limit).read(written)


@pytest.mark.parametrize("written", ["auto", "cpu", "cuda:0", "cuda:12"])
def test_a_device_is_read_by_its_name(written):
    assert read_device(written) == written


def test_cuda_without_a_number_is_the_first_gpu():
    assert read_device("cuda") == "cuda:0"


@pytest.mark.parametrize("written", ["gpu", "cuda:", "cuda:x", "CPU", "", 0, None])
def test_a_bad_device_is_refused(written):
    with pytest.raises(ValueError, match="cuda:N"):
        read_device(written)
