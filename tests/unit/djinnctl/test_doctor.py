"""Every judgement on fixed facts, and the checks on this machine's own."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from djinn_client import (
    CertificateNotTrusted,
    ConnectionLost,
    DjinnError,
    InvalidRequest,
    NotAuthenticated,
    VersionMismatch,
)
from djinn_client.protocol import Failure, Hello, StatusReply, Welcome
from djinn_client.transport.address import hosts_file
from djinn_client.transport.remote.hosts import Host, RemoteAddress, remember
from djinnctl import doctor
from djinnctl.cli import main
from djinnctl.doctor import arena, daemon, gpu, memory, remote, software
from djinnctl.doctor.gpu import Cuda, Gpu
from djinnctl.doctor.result import Result
from djinnd.server.arenas.header import VERSION, FillState, Header
from tests.support.daemon import ROOT
from tests.support.scripted_daemon import Line, ScriptedDaemon

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
UNLIMITED = resource.RLIM_INFINITY


# --- software -------------------------------------------------------------------------------------------------------


def test_an_old_python_is_a_failure() -> None:
    assert software.judge_python((3, 11, 0)).state == "ok"
    too_old = software.judge_python((3, 10, 9))
    assert (too_old.state, too_old.finding) == ("fail", "3.10.9")
    assert "3.11" in too_old.remedy


@pytest.mark.parametrize(
    ("found", "oldest", "state"),
    [
        ("2.13.0+cpu", (2, 11), "ok"),
        ("2.11.0", (2, 11), "ok"),
        ("2.9.1", (2, 11), "fail"),
        ("3.0", (2, 11), "ok"),
        ("2.11.0a0+git1", (2, 11), "ok"),
        ("anything", (), "ok"),
        (None, (), "fail"),
        (None, (2, 11), "fail"),
    ],
)
def test_a_missing_or_old_package_is_reported(found: str | None, oldest: tuple[int, ...], state: str) -> None:
    assert software.judge_package("torch", found, oldest).state == state


def test_the_remedy_for_an_old_package_is_a_command() -> None:
    result = software.judge_package("torch", "2.9", (2, 11))
    assert result.finding == "2.9, but 2.11 or newer is needed"
    assert result.remedy == "pip install --upgrade 'torch>=2.11'"
    assert software.judge_package("rich", None, ()).remedy == "pip install rich"


def test_this_python_has_what_the_project_asks_for() -> None:
    results = [*software.check_python(), *software.check_packages(of_daemon=True)]
    assert [result for result in results if result.state != "ok"] == []
    assert {result.subject for result in results} == {"Python", *software.PACKAGES}


@pytest.mark.parametrize(
    ("project", "listed"), [("client", software.CLIENT_PACKAGES), (".", software.PACKAGES)], ids=["client", "daemon"]
)
def test_doctor_asks_for_the_packages_of_the_project_file(project: str, listed: dict[str, software.Version]) -> None:
    wanted = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(entry.split(",")[0].split(">=") for entry in wanted if ">=" in entry)
    assert {name: software.dotted(version) for name, version in listed.items()} == oldest


def test_a_machine_with_the_client_alone_is_not_told_to_install_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "has_daemon", lambda: False)
    results = [*software.check_packages(of_daemon=False)]
    assert results[0].finding.startswith("not installed here: this is its client")
    assert {result.subject for result in results[1:]} == {*software.CLIENT_PACKAGES}
    assert [subject for subject, _ in doctor.checks(None, None, False)] == ["Python", "packages", "socket", "daemon"]


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "state"), [(1 << 30, "warn"), (64 * GIB, "ok")])
def test_little_host_memory_is_reported_with_its_bound(left: int, state: str) -> None:
    result = memory.judge_memory(memory.Bound(left, "the control group /x"))
    assert result.state == state and "the control group /x" in result.finding


def test_memlock() -> None:
    assert memory.judge_memlock(UNLIMITED, UNLIMITED).state == "ok"
    can_raise = memory.judge_memlock(8 << 20, UNLIMITED)
    assert (can_raise.state, "ulimit -l unlimited" in can_raise.remedy) == ("warn", True)
    cannot = memory.judge_memlock(8 << 20, 8 << 20)
    assert (cannot.state, "limits.conf" in cannot.remedy) == ("warn", True)
    assert cannot.finding.startswith("8.0 MiB may be locked")


@pytest.mark.parametrize(
    ("total", "free", "physical", "state"),
    [
        (64 << 20, 64 << 20, 128 * GIB, "fail"),
        (64 * GIB, 100 << 20, 128 * GIB, "fail"),
        (8 * GIB, 8 * GIB, 128 * GIB, "warn"),
        (64 * GIB, 63 * GIB, 128 * GIB, "ok"),
    ],
)
def test_a_small_or_full_dev_shm_is_reported(total: int, free: int, physical: int, state: str) -> None:
    result = memory.judge_shm(total, free, physical)
    assert result.state == state
    assert "free of" in result.finding


def test_too_small_a_shm_has_a_command_that_mends_it() -> None:
    assert "mount -o remount,size=98304m /dev/shm" in memory.judge_shm(64 << 20, 64 << 20, 128 * GIB).remedy


@pytest.mark.parametrize(
    ("options", "enabled", "state", "finding"),
    [
        ("rw,relatime,size=24684092k", "never", "warn", "4 KiB"),
        ("rw,relatime,huge=within_size", "never", "ok", "within_size"),
        ("rw,huge=always,size=1k", "never", "ok", "always"),
        ("rw,huge=advise", "never", "warn", "4 KiB"),
        ("rw", "within_size", "warn", "4 KiB"),  # which is of memory without a mount
        ("rw,huge=within_size", "deny", "warn", "denies"),
        ("rw", "force", "ok", "force"),
    ],
)
def test_huge_pages(options: str, enabled: str, state: str, finding: str) -> None:
    modes = "always within_size advise never deny force".replace(enabled, f"[{enabled}]")
    mounts = f"tmpfs /tmp tmpfs rw,huge=always 0 0\ntmpfs /dev/shm tmpfs {options} 0 0\n"
    result = memory.judge_huge_pages(mounts, modes)
    assert result.state == state
    assert finding in result.finding


def test_the_mount_that_is_seen_decides_about_huge_pages() -> None:
    mounts = "tmpfs /dev/shm tmpfs rw,huge=always 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    assert memory.judge_huge_pages(mounts, "[never]").state == "warn"
    assert memory.judge_huge_pages("", "[never]").state == "warn"


# --- gpu ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "driver", "state"),
    [
        (Cuda("13.0", (H200,)), "580.65", "ok"),
        (Cuda("13.0", ()), None, "warn"),
        (Cuda("", ()), None, "warn"),
        (Cuda("", ()), "580.65", "warn"),
        (Cuda("13.0", ()), "580.65", "fail"),
    ],
)
def test_a_missing_gpu_is_reported_by_its_cause(cuda: Cuda, driver: str | None, state: str) -> None:
    assert gpu.judge_cuda(cuda, driver).state == state


@pytest.mark.parametrize(
    ("driver", "built", "state"),
    [("580.65.06", "13.0", "ok"), ("570.86", "13.0", "fail"), ("570.86", "12.8", "ok"), ("570.86", "", "ok")],
)
def test_a_driver_older_than_the_build_is_reported(driver: str, built: str, state: str) -> None:
    assert gpu.judge_driver(driver, Cuda(built, ())).state == state


def test_device_memory() -> None:
    assert gpu.judge_memory(H200) == Result("ok", "cuda:0", "NVIDIA H200, capability 9.0, 139 GiB free of 140 GiB")
    assert gpu.judge_memory(Gpu(1, "L4", (8, 9), 24 * GIB, 9 * GIB)).state == "warn"


def test_slow_copies_over_the_bus_are_a_warning() -> None:
    assert gpu.judge_copies(0, 55.3, 55.2).finding == ("55.3 GB/s to the device, 55.2 GB/s back, from pinned memory")
    assert gpu.judge_copies(0, 55.3, 55.2).state == "ok"
    assert gpu.judge_copies(0, 55.3, 6.0).state == "warn"


@pytest.mark.parametrize(
    ("version", "compiler", "wanted", "state"),
    [
        ("3.7.0", "/usr/bin/cc", True, "ok"),
        ("3.7.0", None, True, "fail"),
        (None, "/usr/bin/cc", True, "fail"),
        (None, None, False, "ok"),
    ],
)
def test_triton_without_a_compiler_is_reported(
    version: str | None, compiler: str | None, wanted: bool, state: str
) -> None:
    assert gpu.judge_triton(version, compiler, wanted).state == state


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    results = list(gpu.check())
    assert results[0].subject == "CUDA"
    assert results[0].state == "ok"
    to_device, to_host = gpu.measure_copies(0)
    assert 0 < to_device < 1000
    assert 0 < to_host < 1000
    assert any("from pinned memory" in result.finding for result in results)


# --- socket ---------------------------------------------------------------------------------------------------------


def test_a_daemon_that_answers(daemon: ScriptedDaemon) -> None:
    address = daemon.play(Line.welcome)
    assert list(doctor.daemon.check(address)) == [Result("ok", "socket", f"djinnd 0.1.0 answers at {address}")]


def test_a_daemon_s_notes_are_warnings_with_their_remedy() -> None:
    assert list(daemon.judge_notes([])) == []
    (result,) = daemon.judge_notes(["the journal was damaged; it is kept as /s/journal.db.damaged-1: remove it"])
    assert (result.state, result.remedy) == ("warn", "remove it") and result.finding.endswith("damaged-1")


def test_no_daemon() -> None:
    result = daemon.examine("/nowhere/s")
    assert result == Result("warn", "socket", "no daemon at /nowhere/s", "start it with `djinnd`")


def test_a_stale_socket(directory: str) -> None:
    path = os.path.join(directory, "s")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    result = daemon.examine(path)
    assert result.state == "warn"
    assert "left from one that is gone" in result.finding


def test_a_daemon_that_hangs(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "PATIENCE_S", 0.05)
    path = os.path.join(directory, "s")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        result = daemon.examine(path)
    assert result.state == "fail"
    assert "nobody answers" in result.finding


def test_something_else_that_answers(directory: str) -> None:
    path = os.path.join(directory, "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        import threading

        def greet() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH\r\n")
                sock.recv(100)

        thread = threading.Thread(target=greet)
        thread.start()
        result = daemon.examine(path)
        thread.join()
    assert result.state == "fail"
    assert "not djinnd's protocol" in result.finding


def test_a_token_that_the_daemon_does_not_know(daemon: ScriptedDaemon) -> None:
    def refuse(line: Line) -> None:
        line.send(Failure(id=line.expect(Hello).id, code="not_authenticated", message="not valid"))

    result = doctor.daemon.examine(daemon.play(refuse), "djn_x")
    assert result.state == "fail" and "not valid" in result.finding and "another token" in result.remedy


# --- another machine ------------------------------------------------------------------------------------------------

MACHINE = RemoteAddress("gpu1", 5556)


def judged(error: DjinnError | TimeoutError) -> tuple[list[str], Result]:
    *before, last = remote.judge_failure(MACHINE, error)
    assert all(result.state == "ok" for result in before)
    return [result.subject for result in before], last


@pytest.mark.parametrize(
    ("error", "before", "subject"),
    [
        (TimeoutError(), [], "connection"),
        (ConnectionLost("no gateway answers: does a firewall let the port through?"), [], "connection"),
        (CertificateNotTrusted("no authority certifies it: `djinnctl trust`"), ["connection"], "certificate"),
        (NotAuthenticated("not valid: have another one"), ["connection", "certificate"], "token"),
        (VersionMismatch("version 1, this side speaks 2: update the older one"), [], "connection"),
    ],
)
def test_the_first_thing_that_is_wrong_with_another_machine_ends_the_list(
    error: DjinnError | TimeoutError, before: list[str], subject: str
) -> None:
    passed, failed = judged(error)
    assert (passed, failed.state, failed.subject) == (before, "fail", subject)
    if isinstance(error, DjinnError):
        assert error.message == f"{failed.finding}: {failed.remedy}"


def test_an_error_without_a_remedy_points_to_the_log() -> None:
    assert judged(DjinnError("it failed"))[1] == Result("fail", "connection", "it failed", remote.SEE_LOG)


@pytest.mark.parametrize(("state", "judgement"), [("ready", "ok"), ("starting", "warn"), ("draining", "warn")])
def test_the_answer_of_another_machine_is_told(state: str, judgement: str) -> None:
    notes = ["damaged: remove it"]
    status = StatusReply("0.1.0", 1, 1.0, "/s", state, [], [], {}, 0, 0, 1, 0, notes=notes, id=2)
    results = list(remote.judge_answer(MACHINE, Welcome("0.1.0", 1, True, "ana", id=1), status))
    assert [result.subject for result in results] == ["connection", "certificate", "token", "daemon", "daemon"]
    assert results[2].finding.endswith("takes you for ana, an administrator")
    assert results[3].state == judgement and results[4].state == "warn"


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (MACHINE, "an authority that this machine trusts"),
        (MACHINE._replace(ca="/ca.pem"), "by /ca.pem"),
        (MACHINE._replace(ca="/ca.pem", fingerprint="sha256:0"), "the one that was trusted"),
    ],
)
def test_a_certificate_s_ground_is_told(machine: RemoteAddress, told: str) -> None:
    assert told in remote.certified_by(machine)


def test_another_machine_s_list_leaves_this_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = ["Python", "packages", "connection"]
    assert [subject for subject, _ in doctor.checks("djinns://gpu1", None, False)] == subjects
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DJINND_ADDRESS", raising=False)
    remember("gpu1", Host("djinns://gpu1"), hosts_file())
    assert [subject for subject, _ in doctor.checks(None, None, False)] == subjects, "gpu1 is the default"
    with pytest.raises(InvalidRequest, match="machine, gpu1"):
        doctor.checks("gpu1", None, True)


# --- arena ----------------------------------------------------------------------------------------------------------


def arena_object(root: Path, name: str, pid: int, ticks: int) -> Path:
    path = root / name
    path.write_bytes(b"DJARENA1" + struct.pack("<QQ", pid, ticks) + bytes(1000))
    return path


def own_ticks() -> int:
    ticks = arena.started(os.getpid())
    assert ticks is not None
    return ticks


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_started_agrees_with_the_kernel_s_own_account() -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    assert own_ticks() == int(fields[22 - 3])  # fields count from 1; the first two are cut off


def test_a_process_that_is_gone_or_only_a_corpse_never_started() -> None:
    assert arena.started(dead_process()) is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert arena.started(child.pid) is None
    child.wait()


def test_an_object_of_a_running_daemon_stays(tmp_path: Path) -> None:
    path = arena_object(tmp_path, "djinnd-weights", os.getpid(), own_ticks())
    (result,) = arena.check(tmp_path, fix=True)
    assert result.state == "ok"
    assert path.exists()


@pytest.mark.parametrize("why", ["dead", "recycled"])
def test_an_object_of_a_daemon_that_is_gone(tmp_path: Path, why: str) -> None:
    pid, ticks = (dead_process(), 1) if why == "dead" else (os.getpid(), own_ticks() + 1)
    path = arena_object(tmp_path, "djinnd-weights", pid, ticks)
    (result,) = arena.check(tmp_path)
    assert result.state == "warn"
    assert f"left from process {pid}, which is gone" in result.finding
    assert path.exists()
    (result,) = arena.check(tmp_path, fix=True)
    assert (result.state, result.finding) == (
        "ok",
        f"removed djinnd-weights (1.0 KiB) of process {pid}, which is gone",
    )
    assert not path.exists()


def whole_object(root: Path, pid: int, ticks: int, version: int = 4, state: int = 2, payload: int = 1000) -> Path:
    """Writes an object with the header of djinnd/server/arenas/header.py and 1,000 bytes of weights."""
    fixed = struct.pack("<8sQQIIQQ64s", b"DJARENA1", pid, ticks, version, state, payload, 1, b"ab" * 32)
    path = root / "djinnd-weights"
    texts = b"weights".ljust(16, b"\0") + b"llama".ljust(1920, b"\0") + b"/var/lib/djinnd".ljust(2048, b"\0")
    path.write_bytes(fixed + texts + bytes(1000))
    return path


def test_a_whole_model_of_a_daemon_that_is_gone_waits_for_the_next_one(tmp_path: Path) -> None:
    pid = dead_process()
    path = whole_object(tmp_path, pid, 1)
    (result,) = arena.check(tmp_path)
    assert result.state == "warn"
    assert f"(5.0 KiB) has the weights of llama from process {pid}, which is gone" in result.finding
    assert "the next djinnd with state directory /var/lib/djinnd takes it over" in result.remedy
    assert path.exists()
    (result,) = arena.check(tmp_path, fix=True)
    assert result.state == "ok" and not path.exists(), "who says --fix wants the memory back"


def test_a_whole_model_of_a_running_daemon_is_that_daemon_s(tmp_path: Path) -> None:
    whole_object(tmp_path, os.getpid(), own_ticks())
    (result,) = arena.check(tmp_path, fix=True)
    assert result.state == "ok" and "which runs" in result.finding


@pytest.mark.parametrize("why", [{"version": 1}, {"state": 1}, {"payload": 1001}])
def test_an_object_that_no_daemon_adopts_is_reported_as_left_behind(tmp_path: Path, why: dict[str, int]) -> None:
    whole_object(tmp_path, dead_process(), 1, **why)
    (result,) = arena.check(tmp_path)
    assert "is left from process" in result.finding


@pytest.mark.parametrize("state", [FillState.COMPLETE, FillState.ASLEEP])
def test_the_daemon_s_own_header_is_the_one_that_doctor_reads(tmp_path: Path, state: FillState) -> None:
    header = Header(dead_process(), 1, VERSION, state, 4096, 1, "ab" * 32, "pages", "größe", "/state")
    (tmp_path / "djinnd-weights").write_bytes(header.pack() + bytes(4096))
    (result,) = arena.check(tmp_path)
    assert "has the pages of größe" in result.finding and "directory /state takes" in result.remedy


@pytest.mark.parametrize("content", [b"", b"DJARENA1", b"\0" * 4096, b"DJARENA2" + bytes(100)])
def test_an_object_without_our_header_is_named_and_never_removed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "djinnd-unknown"
    path.write_bytes(content)
    (result,) = arena.check(tmp_path, fix=True)
    assert result.state == "warn"
    assert path.exists()


def test_objects_of_others_are_not_looked_at(tmp_path: Path) -> None:
    arena_object(tmp_path, "psm_1234", dead_process(), 1)
    (result,) = arena.check(tmp_path, fix=True)
    assert "nothing of djinnd's" in result.finding
    assert (tmp_path / "psm_1234").exists()


def test_an_object_whose_owner_lives_where_its_number_is_not_known(tmp_path: Path) -> None:
    """In another container, say: the lock tells."""
    path = arena_object(tmp_path, "djinnd-weights", dead_process(), 1)
    with path.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (result,) = arena.check(tmp_path, fix=True)
        assert result.state == "ok"
        assert path.exists()
    (result,) = arena.check(tmp_path)
    assert result.state == "warn"


def test_a_look_leaves_no_lock(tmp_path: Path) -> None:
    path = arena_object(tmp_path, "djinnd-weights", dead_process(), 1)
    list(arena.check(tmp_path))
    with path.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to("/etc/passwd"), "a symbolic link"),
        (lambda path: path.symlink_to(path), "a symbolic link"),
        (Path.mkdir, "a folder"),
        (a_socket, "a socket"),
    ],
)
def test_pipes_and_links_are_named_and_neither_opened_nor_removed(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(tmp_path / "djinnd-0-odd")
    dead = arena_object(tmp_path, "djinnd-1-weights", dead_process(), 1)
    odd, removed = arena.check(tmp_path, fix=True)
    assert (odd.state, odd.finding) == ("warn", f"djinnd-0-odd is {kind}, which no djinnd has made")
    assert removed.state == "ok" and not dead.exists()
    assert os.path.lexists(tmp_path / "djinnd-0-odd")


def test_an_object_with_a_lease_on_it_is_not_waited_for(tmp_path: Path) -> None:
    path = arena_object(tmp_path, "djinnd-1-weights", dead_process(), 1)
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # a signal that is ignored
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        (result,) = arena.check(tmp_path)
    assert (result.state, result.finding) == ("warn", "djinnd-1-weights is not yours to read")


# --- all of it ------------------------------------------------------------------------------------------------------


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Result]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(
        doctor, "checks", lambda address, token, fix: [("odd", broken), ("Python", software.check_python)]
    )
    first, second = doctor.examine()
    assert (first.state, first.finding) == ("fail", "the check broke: ZeroDivisionError: by zero")
    assert second.state == "ok"


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_code_follows_the_worst(monkeypatch: pytest.MonkeyPatch, state: str, code: int) -> None:
    result = Result(state, "subject", "finding", "" if state == "ok" else "remedy")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "checks", lambda address, token, fix: [("subject", lambda: [result])])
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == code
    assert ("→ remedy" in done.stdout) == (state != "ok")
    shown = CliRunner().invoke(main, ["doctor", "--json"])
    assert json.loads(shown.stdout) == [
        {"state": state, "subject": "subject", "finding": "finding", "remedy": result.remedy}
    ]


def test_a_result_that_is_not_ok_needs_a_remedy() -> None:
    with pytest.raises(AssertionError):
        Result("fail", "x", "y")


def test_the_whole_examination_runs_here() -> None:
    results = doctor.examine(address="/nowhere/s")
    assert {"Python", "torch", "CUDA", "memlock", "/dev/shm", "socket", "arena"} <= {r.subject for r in results}
    assert not any("the check broke" in result.finding for result in results)
