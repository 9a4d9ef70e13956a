"""Seccomp: a filter of the system calls that a confined process may make (seccomp(2)), as a classic BPF program.

Calls that computation needs are allowed. Calls that make processes or sockets, or that reach into other processes, kill
the process with SIGSYS, so that the tenant notices. All other calls return ENOSYS, as on an older kernel: libraries
try new calls and do without them. The filter cannot be removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from djinnd.confinement.libc import checked, libc

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _MODE_FILTER = 21, 22, 2

KILL, ALLOW, NO_SUCH_CALL = 0x8000_0000, 0x7FFF_0000, 0x0005_0000 | errno.ENOSYS

_LOAD, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
_ANY_OF = 0x45  # BPF_JMP|JSET|K
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; the lower half of an argument comes first
_X32 = 0x4000_0000  # set in the numbers of x86-64's second table of calls, for the x32 ABI

_F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC, _F_GET_SEALS = 1, 2, 3, 1030, 1034


class Machine(NamedTuple):
    """An architecture: its number in struct seccomp_data, and its column in the tables below."""

    audit_arch: int
    column: int


MACHINES = {"x86_64": Machine(0xC000_003E, 0), "aarch64": Machine(0xC000_00B7, 1)}

# Numbers on x86-64 and on aarch64; None: aarch64 does not have that older call.
ALLOWED: dict[str, tuple[int, int | None]] = {
    # open files, and files that Landlock permits to open
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "dup": (32, 23),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "stat": (4, None),
    "lstat": (6, None),
    "open": (2, None),
    "openat": (257, 56),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    # memory
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "mincore": (27, 232),
    "membarrier": (324, 283),
    # time, the process itself, its end
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrusage": (98, 165),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "set_robust_list": (273, 99),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

DEADLY: dict[str, tuple[int, int | None]] = {
    # processes and threads
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    # the network, and other processes' sockets
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    # the kernel itself
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}

_TGKILL, _FCNTL = (234, 131), (72, 25)

# Calls on its socket to the server (it can make no other socket): the numbers, and the index of the flags argument.
MESSAGES: dict[str, tuple[tuple[int, int], int]] = {
    "recvmsg": ((47, 212), 2),
    "recvfrom": ((45, 207), 3),
    "sendmsg": ((46, 211), 2),
    "sendto": ((44, 206), 3),
}
_MSG_OOB = 1  # not allowed: out-of-band data on Unix sockets has been a way to attack the kernel

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand: struct sock_filter


def program(machine: Machine, pid: int) -> list[Instruction]:
    """The filter of process `pid`. tgkill is allowed to the process itself, since abort() needs it. fcntl is allowed
    without F_SETOWN, with which the kernel would send signals to other processes."""
    arch, column = machine
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, KILL),
        *_answers(ALLOWED, column, ALLOW),
        *_answers(DEADLY, column, KILL),
        *_without(_MSG_OOB, column),
        *_only(_TGKILL[column], 0, [pid], KILL),
        *_only(_FCNTL[column], 1, [_F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC, _F_GET_SEALS], NO_SUCH_CALL),
        (_RETURN, 0, 0, NO_SUCH_CALL),
    ]


def _answers(calls: dict[str, tuple[int, int | None]], column: int, answer: int) -> Iterator[Instruction]:
    for numbers in calls.values():
        number = numbers[column]
        if number is not None:
            yield (_EQUAL, 0, 1, number)
            yield (_RETURN, 0, 0, answer)


def _only(number: int, argument: int, values: Sequence[int], otherwise: int) -> Iterator[Instruction]:
    """Allows the call if the argument has one of these 32-bit values; `otherwise` answers other values. Other calls go
    on to the next instruction."""
    yield (_EQUAL, 0, 2 + 2 * len(values), number)
    yield (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    for value in values:
        yield (_EQUAL, 0, 1, value)
        yield (_RETURN, 0, 0, ALLOW)
    yield (_RETURN, 0, 0, otherwise)


def _without(flag: int, column: int) -> Iterator[Instruction]:
    """Allows MESSAGES without this flag. Other calls go on to the next instruction."""
    for numbers, argument in MESSAGES.values():
        yield (_EQUAL, 0, 4, numbers[column])
        yield (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
        yield (_ANY_OF, 0, 1, flag)
        yield (_RETURN, 0, 0, NO_SUCH_CALL)
        yield (_RETURN, 0, 0, ALLOW)


def missing() -> str:
    """The feature that this machine lacks for a filter; "" if none."""
    if platform.machine() not in MACHINES:
        return f"a filter of system calls for {platform.machine()}"
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "seccomp filters (CONFIG_SECCOMP_FILTER)"
    return ""


def install() -> None:
    """Installs the filter for this thread and its children. `no_new_privs` must be set. Raises OSError."""
    instructions = program(MACHINES[platform.machine()], os.getpid())
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    memory = ctypes.create_string_buffer(code)
    filter = _Program(len(instructions), ctypes.cast(memory, ctypes.c_void_p))
    checked(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter), 0, 0), "the seccomp filter was refused")


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))
