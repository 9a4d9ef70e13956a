"""The nursery: a process that has already imported the engines' libraries, and forks engines. See
djinnd/jobs/nursery.py.

It is a child of this process, dies with it, and is handed to the successor at a restart. It is optional: without it, or
if it fails, engines are started by their command, which takes some seconds longer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from djinnd.jobs import nursery as births
from djinnd.jobs.nursery import MAX_PACKET, Bear, Born, Ended, Refused
from djinnd.server.handover.pidfds import end_of, open_pidfd
from djinnd.server.handover.succession import Inherited

log = logging.getLogger("djinnd.server")

NURSERY_FDS = ("djinnd-nursery", "djinnd-nursery-process")  # names of the descriptors that a predecessor hands over
_ANSWER = 5.0  # seconds in which a nursery with imported libraries must fork
_WORD = 1.0  # seconds from a process's end until the nursery must have reported its status
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these signals; its children must not


class NurseryLost(Exception):
    """The nursery cannot fork; the text says why."""


class Nursery:
    """Owns the nursery process. `command` starts one; empty: there is none. It forks one process at a time: engines,
    and inspections of checkpoints."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], given: Sequence[Inherited]) -> None:
        """Takes over the descriptors of `hand_over`, or starts a process at once, because it has much to import."""
        self._command = command
        self._environ = environ
        self._process: NurseryProcess | None = None
        self._turn = asyncio.Lock()
        if given:
            sock, pidfd = (fd for _, fd in given)
            self._process = NurseryProcess(socket.socket(fileno=sock), pidfd, is_new=False)
        else:
            self._start()

    async def bear(
        self,
        command: Sequence[str],
        sock: socket.socket,
        patience: float,
        environ: Mapping[str, str] | None = None,
    ) -> BornProcess | None:
        """Forks a process that runs `command`, a `python -m …`, with `sock` as its socket (see births.Bear). Returns
        None if the caller must start it by its command. `patience`: seconds that a new nursery may take to import its
        libraries. `environ` None: the nursery's environment."""
        module_and_options = list(command[command.index("-m") + 1 :])
        request = Bear(module_and_options, dict(self._environ if environ is None else environ), births.versions())
        async with self._turn:
            return await self._bear(request, sock, patience)

    async def _bear(self, request: Bear, sock: socket.socket, patience: float) -> BornProcess | None:
        if self._process is None:
            self._start()
        while self._process is not None:
            process = self._process
            try:
                return await process.bear(request, sock, patience)
            except NurseryLost as lost:
                log.warning("nursery_lost reason=%s", lost)
                await self.close()
                if not process.is_new:  # it died since its last fork, or is outdated
                    self._start()
            except BaseException:
                process.kill()  # else it would answer later, without a request
                raise
        return None

    @property
    def is_sound(self) -> bool:
        """True if there is a nursery that can fork."""
        return self._process is not None and self._process.is_sound

    def hand_over(self) -> list[Inherited]:
        """The descriptors for the successor. This object must not be used after that."""
        if self._process is None:
            return []
        return [Inherited(name, fd) for name, fd in zip(NURSERY_FDS, self._process.detach(), strict=True)]

    async def close(self) -> None:
        """Kills the nursery, and with it the processes that it has forked. Returns when it is gone."""
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.shield(process.end())  # reaped also if this caller is cancelled

    def _start(self) -> None:
        if not self._command:
            return
        try:
            self._process = NurseryProcess.start(self._command, self._environ)
        except OSError as error:
            log.warning("nursery_failed error=%s", error)


class NurseryProcess:
    """One nursery process, from its start or its takeover to its end."""

    def __init__(self, sock: socket.socket, pidfd: int, is_new: bool) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._pidfd = pidfd
        self.is_new = is_new  # has forked nothing yet, and may still be importing its libraries
        self._is_heard = False
        self._lost = ""  # why it cannot be used any more
        self._asked: asyncio.Future[BornProcess] | None = None
        self._born: dict[int, BornProcess] = {}  # by pid: processes that have not ended

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> NurseryProcess:
        """Starts a nursery in a session of its own, as a terminal's Ctrl-C goes to the server alone. Raises OSError."""
        os.close(open_pidfd(os.getpid()))  # fails if the kernel has no pidfds
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            try:
                pid = os.posix_spawn(
                    command[0],
                    [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                    environ,
                    file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                    setsid=True,
                    setsigmask=(),
                    setsigdef=_IGNORED,
                )
            except OSError:
                ours.close()
                raise
        log.info("nursery_started pid=%d", pid)
        return cls(ours, open_pidfd(pid), is_new=True)

    @property
    def is_sound(self) -> bool:
        return not self._lost

    async def bear(self, request: Bear, sock: socket.socket, patience: float) -> BornProcess:
        """Forks a process. Raises NurseryLost."""
        assert self._asked is None
        if self._lost:
            raise NurseryLost(self._lost)
        if not self._is_heard:
            asyncio.get_running_loop().add_reader(self._socket, self._readable)
            self._is_heard = True
        limit = patience if self.is_new else _ANSWER
        try:
            socket.send_fds(self._socket, [births.encode(request)], [sock.fileno()])
            self._asked = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(limit):
                born = await self._asked
        except TimeoutError:
            raise NurseryLost(f"it has not answered for {limit:g} s") from None
        except OSError as error:
            raise NurseryLost(str(error)) from error
        finally:
            self._asked = None
        self.is_new = False
        return born

    def kill(self) -> None:
        self._lose("it was killed")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        self.kill()
        await end_of(self._pidfd)
        os.close(self._pidfd)
        self._socket.close()

    def detach(self) -> tuple[int, int]:
        """Its socket and its pidfd, for a successor. This object must not be used after that."""
        self._lose("it has another owner")
        return self._socket.detach(), self._pidfd

    # --- its messages -------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            message = births.decode_from_nursery(packet) if packet else None
        except OSError:
            message = None
        except msgspec.DecodeError as error:
            return self._lose(f"it cannot be understood: {error}")
        match message:
            case Born(pid=pid):
                assert self._asked is not None, "a caller that is cancelled kills the nursery"
                self._born[pid] = BornProcess(pid, *fds)
                self._asked.set_result(self._born[pid])
            case Ended(pid=pid, status=status):
                if pid in self._born:  # else a predecessor has started it
                    self._born.pop(pid).ended(status)
            case Refused(reason=reason):
                self._lose(reason)
            case None:
                self._lose("it has died")

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = reason
        if self._is_heard:
            asyncio.get_running_loop().remove_reader(self._socket)
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(NurseryLost(reason))
        for born in self._born.values():
            born.orphaned()
        self._born.clear()


class BornProcess:
    """A process that the nursery has forked, as EngineProcess needs it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.create_task(self._wait())

    async def wait(self) -> int:
        """Returns its exit status when it has ended, negative for a signal."""
        return await asyncio.shield(self._gone)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def orphaned(self) -> None:
        """Called when the nursery has died, with which the kernel kills this process."""
        self.ended(-signal.SIGKILL)

    async def _wait(self) -> int:
        """Waits for its end, by the kernel, which knows it even if the nursery is stopped. Its status comes from the
        nursery."""
        await end_of(self._pidfd)
        os.close(self._pidfd)
        with suppress(TimeoutError):
            async with asyncio.timeout(_WORD):
                return await self._status
        return -signal.SIGKILL
