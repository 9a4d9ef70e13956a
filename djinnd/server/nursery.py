"""The process that engines are forked from: it has imported their libraries already. See djinnd/births.py.

It is a child of this process, dies with it, and goes to the successor at a restart. It is never needed: where there is
none, or it fails, engines are started by their command, and take some seconds longer.
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

from djinnd import births
from djinnd.births import MAX_PACKET, Bear, Born, Ended, Refused
from djinnd.server.pidfds import end_of, open_pidfd
from djinnd.server.succession import Inherited

log = logging.getLogger("djinnd.server")

NURSERY_FDS = ("djinnd-nursery", "djinnd-nursery-process")  # of the descriptors that a predecessor leaves
_ANSWER = 5.0  # seconds in which a nursery that has its libraries forks
_WORD = 1.0  # seconds from an engine's end until the nursery has said how it ended
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python, and not for its children


class NurseryLost(Exception):
    """Why it bears no engine."""


class Nursery:
    """Owns the nursery process. `command` starts one; without, there is none. It bears one process at a time: engines,
    and the inspections of checkpoints."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], given: Sequence[Inherited]) -> None:
        """Takes over what `hand_over` has given, else starts a process: at once, for it has much to import."""
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
        """A process that runs `command`, a `python -m`, as births.Bear says; `sock` is its socket. None where the
        caller has to start it. `patience`: seconds that a new nursery may take to import its libraries. `environ` None:
        the nursery's."""
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
                if not process.is_new:  # it has died since it was last asked, or is outdated
                    self._start()
            except BaseException:
                process.kill()  # it would answer when nobody asks any more
                raise
        return None

    @property
    def is_sound(self) -> bool:
        """Whether there is one that waits to be asked."""
        return self._process is not None and self._process.is_sound

    def hand_over(self) -> list[Inherited]:
        """For the successor; this object is of no use then."""
        if self._process is None:
            return []
        return [Inherited(name, fd) for name, fd in zip(NURSERY_FDS, self._process.detach(), strict=True)]

    async def close(self) -> None:
        """Ends the process, and with it what it has forked. Returns when it is gone."""
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.shield(process.end())  # whoever is cancelled meanwhile: it is reaped

    def _start(self) -> None:
        if not self._command:
            return
        try:
            self._process = NurseryProcess.start(self._command, self._environ)
        except OSError as error:
            log.warning("nursery_failed error=%s", error)


class NurseryProcess:
    """One nursery, from its start or from a predecessor's hands to its end."""

    def __init__(self, sock: socket.socket, pidfd: int, is_new: bool) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._pidfd = pidfd
        self.is_new = is_new  # has borne nothing yet, and may be importing its libraries
        self._is_heard = False
        self._lost = ""  # why it is of no use any more
        self._asked: asyncio.Future[BornProcess] | None = None
        self._born: dict[int, BornProcess] = {}  # and not ended, by pid

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> NurseryProcess:
        """In a session of its own: a terminal's Ctrl-C is for the server. Raises OSError."""
        os.close(open_pidfd(os.getpid()))  # there are such
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
        """Raises NurseryLost."""
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
        """Its socket and its pidfd, for a successor; this object is of no use then."""
        self._lose("it has another owner")
        return self._socket.detach(), self._pidfd

    # --- what it says -----------------------------------------------------------------------------------------------

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
                assert self._asked is not None, "who stops waiting kills it"
                self._born[pid] = BornProcess(pid, *fds)
                self._asked.set_result(self._born[pid])
            case Ended(pid=pid, status=status):
                if pid in self._born:  # and not a predecessor's
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
    """An engine's process, as EngineProcess knows one."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.create_task(self._wait())

    async def wait(self) -> int:
        """Its exit status, negative for a signal, when it has ended."""
        return await asyncio.shield(self._gone)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def orphaned(self) -> None:
        """The nursery's death is its own, by this signal."""
        self.ended(-signal.SIGKILL)

    async def _wait(self) -> int:
        """The kernel knows that it has ended, also where the nursery is stopped; how, the nursery."""
        await end_of(self._pidfd)
        os.close(self._pidfd)
        with suppress(TimeoutError):
            async with asyncio.timeout(_WORD):
                return await self._status
        return -signal.SIGKILL
