"""Runs the filter's program in a small BPF interpreter, and compares its tables with the kernel's headers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from djinnd.confinement.seccomp import (
    ALLOW,
    ALLOWED,
    DEADLY,
    KILL,
    MACHINES,
    MESSAGES,
    NO_SUCH_CALL,
    program,
)

PID = 4711
COLUMNS = {name: machine.column for name, machine in MACHINES.items()}
TGKILL, FCNTL = {"x86_64": 234, "aarch64": 131}, {"x86_64": 72, "aarch64": 25}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def answer(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """The filter's answer to a call: interprets classic BPF over struct seccomp_data, as the kernel does
    (Documentation/userspace-api/seccomp_filter)."""
    six = [*arguments, *[0] * (6 - len(arguments))]
    arch = MACHINES[machine].audit_arch if arch is None else arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *six)
    instructions, at, loaded = program(MACHINES[machine], PID), 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, operand)
            case 0x15:
                at += if_true if loaded == operand else if_false
            case 0x35:
                at += if_true if loaded >= operand else if_false
            case 0x45:
                at += if_true if loaded & operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no such instruction: {code:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_get_the_answers_of_the_tables_and_others_enosys(machine: str) -> None:
    column = COLUMNS[machine]
    known = {}
    for table, wanted in ((ALLOWED, ALLOW), (DEADLY, KILL)):
        for name, numbers in table.items():
            if (number := numbers[column]) is not None:
                assert answer(machine, number) == wanted, name
                assert known.setdefault(number, name) == name
    known |= {numbers[column]: name for name, (numbers, _) in MESSAGES.items()}
    others = set(range(500)) - known.keys() - {TGKILL[machine], FCNTL[machine]}
    assert {answer(machine, number) for number in others} == {NO_SUCH_CALL}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_allowed_without_urgent_data(machine: str, name: str) -> None:
    numbers, argument = MESSAGES[name]
    for flags, wanted in ((0, ALLOW), (0x4000_0000, ALLOW), (1, NO_SUCH_CALL), (0x41, NO_SUCH_CALL)):
        arguments = [3] * 6
        arguments[argument] = flags
        assert answer(machine, numbers[COLUMNS[machine]], *arguments) == wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_a_process_may_signal_only_itself(machine: str) -> None:
    assert answer(machine, TGKILL[machine], PID, PID, 6) == ALLOW
    assert answer(machine, TGKILL[machine], PID + 1, PID, 6) == KILL
    assert answer(machine, TGKILL[machine], 0) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_fcntl_commands_that_send_signals_are_refused(machine: str) -> None:
    allowed = {command for command in range(1100) if answer(machine, FCNTL[machine], 3, command) == ALLOW}
    assert allowed == {1, 2, 3, 1030, 1034}
    assert answer(machine, FCNTL[machine], 3, 8) == NO_SUCH_CALL  # F_SETOWN


def test_calls_of_another_abi_kill_the_process() -> None:
    read = ALLOWED["read"][0]
    assert answer("x86_64", read, arch=0x4000_0003) == KILL  # the 32-bit ABI
    assert answer("x86_64", 0x4000_0000 | read) == KILL
    assert answer("aarch64", read, arch=MACHINES["x86_64"].audit_arch) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_of_calls_equal_the_kernel_s_headers(machine: str) -> None:
    if not HEADERS[machine].is_file():
        pytest.skip(f"no {HEADERS[machine]}")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", HEADERS[machine].read_text(), re.M)
    numbers = {name: int(number) for name, number in found}
    numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
    numbers.setdefault("memfd_secret", 447)  # since Linux 5.14, not in older headers
    tables = ALLOWED | DEADLY | {name: each for name, (each, _) in MESSAGES.items()}
    ours = {name: each[COLUMNS[machine]] for name, each in tables.items() if each[COLUMNS[machine]] is not None}
    assert ours == {name: numbers[name] for name in ours}
    assert (numbers["tgkill"], numbers["fcntl"]) == (TGKILL[machine], FCNTL[machine])
