"""The fork server: a process that has already imported the engines' libraries, and forks engines. See
djinnd/jobs/fork_server.py.

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

from djinnd.jobs import fork_server as messages
from djinnd.jobs.fork_server import MAX_PACKET, ForkProcess, ForkRefused, ProcessEnded, ProcessForked
from djinnd.server.handover.pidfds import end_of, open_pidfd
from djinnd.server.handover.succession import Inherited

log = logging.getLogger("djinnd.server")

FORK_SERVER_FDS = ("djinnd-nursery", "djinnd-nursery-process")  # names of the descriptors that a predecessor hands over
ANSWER_S = 5.0  # seconds in which a fork server with imported libraries must fork
STATUS_S = 1.0  # seconds from a process's end until the fork server must have reported its status
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these signals; its children must not


class ForkServerLost(Exception):
    """The fork server cannot fork; the text says why."""


class ForkServer:
    """Owns the fork server process. `command` starts one; empty: there is none. It forks one process at a time:
    engines, and inspections of checkpoints."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], given: Sequence[Inherited]) -> None:
        """Takes over the descriptors of `hand_over`, or starts a process at once, because it has much to import."""
        self._command = command
        self._environ = environ
        self._process: ForkServerProcess | None = None
        self._turn = asyncio.Lock()
        if given:
            sock, pidfd = (fd for _, fd in given)
            self._process = ForkServerProcess(socket.socket(fileno=sock), pidfd, is_new=False)
        else:
            self._start()

    async def fork(
        self,
        command: Sequence[str],
        sock: socket.socket,
        patience: float,
        environ: Mapping[str, str] | None = None,
    ) -> ForkedProcess | None:
        """Forks a process that runs `command`, a `python -m …`, with `sock` as its socket (see messages.ForkProcess).
        Returns None if the caller must start it by its command. `patience`: seconds that a new fork server may take to
        import its libraries. `environ` None: the fork server's environment."""
        module_and_options = list(command[command.index("-m") + 1 :])
        request = ForkProcess(
            module_and_options, dict(self._environ if environ is None else environ), messages.versions()
        )
        async with self._turn:
            return await self._fork(request, sock, patience)

    async def _fork(self, request: ForkProcess, sock: socket.socket, patience: float) -> ForkedProcess | None:
        if self._process is None:
            self._start()
        while self._process is not None:
            process = self._process
            try:
                return await process.fork(request, sock, patience)
            except ForkServerLost as lost:
                log.warning("fork_server_lost reason=%s", lost)
                await self.close()
                if not process.is_new:  # it died since its last fork, or is outdated
                    self._start()
            except BaseException:
                process.kill()  # else it would answer later, without a request
                raise
        return None

    @property
    def is_sound(self) -> bool:
        """True if there is a fork server that can fork."""
        return self._process is not None and not self._process.lost

    def hand_over(self) -> list[Inherited]:
        """The descriptors for the successor. This object must not be used after that."""
        if self._process is None:
            return []
        return [Inherited(name, fd) for name, fd in zip(FORK_SERVER_FDS, self._process.detach(), strict=True)]

    async def close(self) -> None:
        """Kills the fork server, and with it the processes that it has forked. Returns when it is gone."""
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.shield(process.end())  # reaped also if this caller is cancelled

    def _start(self) -> None:
        if not self._command:
            return
        try:
            self._process = ForkServerProcess.start(self._command, self._environ)
        except OSError as error:
            log.warning("fork_server_failed error=%s", error)


class ForkServerProcess:
    """One fork server process, from its start or its takeover to its end."""

    def __init__(self, sock: socket.socket, pidfd: int, is_new: bool) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._pidfd = pidfd
        self.is_new = is_new  # has forked nothing yet, and may still be importing its libraries
        self.lost = ""  # why it cannot be used any more; empty: it can
        self._asked: asyncio.Future[ForkedProcess] | None = None
        self._forked: dict[int, ForkedProcess] = {}  # by pid: processes that have not ended
        asyncio.get_running_loop().add_reader(sock, self._readable)

    @classmethod
    def start(cls, command: Sequence[str], environ: Mapping[str, str]) -> ForkServerProcess:
        """Starts a fork server in a session of its own, as a terminal's Ctrl-C goes to the server alone. Raises
        OSError."""
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
        log.info("fork_server_started pid=%d", pid)
        return cls(ours, open_pidfd(pid), is_new=True)

    async def fork(self, request: ForkProcess, sock: socket.socket, patience: float) -> ForkedProcess:
        """Forks a process. Raises ForkServerLost."""
        assert self._asked is None
        if self.lost:
            raise ForkServerLost(self.lost)
        limit = patience if self.is_new else ANSWER_S
        try:
            socket.send_fds(self._socket, [messages.encode(request)], [sock.fileno()])
            self._asked = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(limit):
                forked = await self._asked
        except TimeoutError:
            raise ForkServerLost(f"it has not answered for {limit:g} s") from None
        except OSError as error:
            raise ForkServerLost(str(error)) from error
        finally:
            self._asked = None
        self.is_new = False
        return forked

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
            message = messages.decode_from_fork_server(packet) if packet else None
        except OSError:
            message = None
        except msgspec.DecodeError as error:
            return self._lose(f"it cannot be understood: {error}")
        match message:
            case ProcessForked(pid=pid):
                assert self._asked is not None, "a caller that is cancelled kills the fork server"
                self._forked[pid] = ForkedProcess(pid, *fds)
                self._asked.set_result(self._forked[pid])
            case ProcessEnded(pid=pid, status=status):
                if pid in self._forked:  # else a predecessor has started it
                    self._forked.pop(pid).ended(status)
            case ForkRefused(reason=reason):
                self._lose(reason)
            case None:
                self._lose("it has died")

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(ForkServerLost(reason))
        for forked in self._forked.values():
            forked.ended(-signal.SIGKILL)  # the kernel kills it with the fork server
        self._forked.clear()


class ForkedProcess:
    """A process that the fork server has forked, as EngineProcess needs it."""

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

    async def _wait(self) -> int:
        """Waits for the end of the process through the kernel, which reports it even if the fork server is stopped. The
        exit status comes from the fork server."""
        await end_of(self._pidfd)
        os.close(self._pidfd)
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                return await self._status
        return -signal.SIGKILL
