from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from djinn_client.transport import host_memory, shm
from djinn_client.transport.host_memory import Bound, anonymous_bytes, available, tightest
from djinn_client.transport.shm import LARGE, new_window
from tests.support.descriptors import open_descriptors

MEMINFO = "MemTotal:       100 kB\nMemFree:          10 kB\nMemAvailable:      64 kB\n"
GROUP = {
    "memory.max": "40960\n",
    "memory.current": "20480\n",
    "memory.stat": "anon 4096\ninactive_file 4096\nactive_file 1024\n",
}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups; this process is in /outer/own of them."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/elsewhere\n0::/outer/own\n")
    (tmp_path / "groups" / "outer" / "own").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def limit(folder: Path, **changes: str) -> None:
    for name, text in (GROUP | {f"memory.{key}": value for key, value in changes.items()}).items():
        (folder / name).write_text(text)


def test_without_limits_it_is_what_the_kernel_says_is_available(groups: Path) -> None:
    assert available() == 64 << 10


def test_where_the_kernel_does_not_say_nothing_is_known(groups: Path) -> None:
    (groups.parent / "proc" / "meminfo").unlink()
    (groups.parent / "proc" / "self" / "cgroup").unlink()
    assert available() is None


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 20480 + 4096 + 1024),
        ({"max": "max\n"}, 64 << 10),
        ({"max": "1000000\n"}, 64 << 10),
        ({"current": "999999\n"}, 0),
    ],
)
@pytest.mark.parametrize("group", ["outer/own", "outer", "."])
def test_a_limit_counts_wherever_it_is_set(groups: Path, group: str, changes: dict[str, str], left: int) -> None:
    limit(groups / group, **changes)
    assert available() == left


def test_the_narrowest_of_several_limits_counts(groups: Path) -> None:
    limit(groups / "outer", max="30000\n")
    limit(groups / "outer/own")
    assert available() == 30000 - 20480 + 4096 + 1024


def test_a_group_is_slowed_at_its_high_mark_which_counts_as_a_limit(groups: Path) -> None:
    limit(groups / "outer/own", max="max\n", high="30000\n")
    assert available() == 30000 - 20480 + 4096 + 1024


def test_version_2_beside_version_1(groups: Path) -> None:
    (groups / "unified/outer").mkdir(parents=True)
    limit(groups / "unified/outer")
    assert tightest() == Bound(20480 + 4096 + 1024, f"the control group {groups / 'unified/outer'}")


V1 = {
    "memory.limit_in_bytes": "40960\n",
    "memory.usage_in_bytes": "30720\n",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 2048\ntotal_active_file 512\n",
}


@pytest.mark.parametrize("group", ["memory/elsewhere", "memory"])
def test_a_limit_of_version_1_counts_in_its_own_hierarchy(groups: Path, group: str) -> None:
    """In a container the group that the kernel names is not mounted, and the mount is the group."""
    (groups / group).mkdir(parents=True)
    for name, text in V1.items():
        (groups / group / name).write_text(text)
    assert available() == 10240 + 2048 + 512


def test_no_limit_of_version_1_is_a_huge_number(groups: Path) -> None:
    (groups / "memory").mkdir()
    for name, text in (V1 | {"memory.limit_in_bytes": "9223372036854771712\n"}).items():
        (groups / "memory" / name).write_text(text)
    assert tightest() == Bound(64 << 10, "the machine")


@pytest.mark.parametrize(("kind", "used"), [("RLIMIT_AS", 30), ("RLIMIT_DATA", 10)])
def test_resource_limits_of_the_process_count(
    groups: Path, monkeypatch: pytest.MonkeyPatch, kind: str, used: int
) -> None:
    (groups.parent / "proc/self/status").write_text("Name:\tx y\nVmSize:\t 30 kB\nVmData:\t 10 kB\nRssAnon:\t 5 kB\n")
    limits = {getattr(resource, kind): (40 << 10, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert tightest() == Bound((40 - used) << 10, kind)
    assert anonymous_bytes() == 5 << 10


def test_this_process_has_touched_memory() -> None:
    assert anonymous_bytes() > 1 << 20


def test_a_window_that_the_host_has_no_memory_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(*args: object) -> None:
        raise AssertionError("this would end the process")

    monkeypatch.setattr(shm, "available", lambda: LARGE - 1)
    monkeypatch.setattr(os, "posix_fallocate", takes)
    before = open_descriptors()
    with pytest.raises(OSError, match="67,108,863 bytes of the host's memory are available") as caught:
        new_window("large", LARGE)
    assert caught.value.errno == errno.ENOMEM
    assert open_descriptors() == before


@pytest.mark.parametrize("left", [LARGE, None])
def test_a_window_that_the_host_has_memory_for(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    monkeypatch.setattr(shm, "available", lambda: left)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: os.ftruncate(fd, nbytes))
    fd = new_window("large", LARGE)
    assert os.fstat(fd).st_size == LARGE
    os.close(fd)
