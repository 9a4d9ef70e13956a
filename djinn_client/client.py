"""The blocking client: a session, and a stream of pieces."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from djinn_client.connection import OnProgress
from djinn_client.errors import DjinnError
from djinn_client.options import GenerateOptions
from djinn_client.protocol import Class, Generated, Piece, SessionInfo
from djinn_client.session import SessionSteps, StreamSteps
from djinn_client.steps import run

if TYPE_CHECKING:
    from typing import Self, Unpack

    import numpy as np
    import numpy.typing as npt


class Session:
    """A session of one model; it keeps its tokens and KV in the daemon between calls.

        with djinn.Session("djinn-tiny") as s:
            print(s.generate("def fibonacci(", max_tokens=32).text)

    `model` is loaded first if it is not there; `on_progress` is told how far that has come. `address` is the path of
    the daemon's socket; None: $DJINND_ADDRESS, then the system's, then the user's. The `with` block closes the session.

    Ctrl-C in any call stops the work in the daemon within one step, and the session stays usable. Threads may share a
    session, but not call it at once: the second call raises SessionBusy.
    """

    def __init__(
        self,
        model: str,
        *,
        priority: Class = "interactive",
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Raises ConnectionLost, ModelNotFound, ModelRejected, OutOfMemory, InvalidRequest."""
        self._steps = SessionSteps(address)
        run(self._steps.open(model, priority, on_progress))

    @classmethod
    def _over(cls, steps: SessionSteps) -> Self:
        session = cls.__new__(cls)
        session._steps = steps
        return session

    @property
    def id(self) -> str:
        return self._steps.info.id

    @property
    def info(self) -> SessionInfo:
        """What the daemon said when the session was opened or attached; `djinn.sessions()` has it as it is now."""
        return self._steps.info

    @property
    def token_ids(self) -> list[int]:
        """The session's tokens, prompt and output, as the daemon has them now."""
        return run(self._steps.token_ids())

    def generate(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Generated:
        """Extends the session by the prompt (text or token ids; None goes on from where it is) and generates.

        The options are those of `GenerateOptions`.

        Raises InvalidRequest, PromptTooLong, TokenOutOfRange, OutOfMemory, Retry.
        """
        return run(self._steps.generate(prompt, options))

    def stream(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """As `generate`, piece by piece. The call starts when the first piece is asked for."""
        return Stream(self._steps.stream(prompt, options))

    def forward(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """Extends the session by these n tokens; their logits as float32 [n, vocab], mapped rather than copied."""
        return run(self._steps.forward(token_ids))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens. Raises InvalidRequest where there are not so many."""
        run(self._steps.truncate(length))

    def fork(self, priority: Class | None = None) -> Self:
        """A new session that has this one's tokens and KV, and goes its own way: what both have is held once.

        It has a connection of its own, may be called while this one is, and is closed by itself. `priority` None: as
        this one. Raises SessionBusy while a call runs, NotPermitted at the limit of sessions."""
        return self._over(run(self._steps.fork(priority)))

    def close(self) -> None:
        """Closes the session in the daemon; again does nothing."""
        run(self._steps.close())

    def detach(self) -> None:
        """Hangs up. The session lives on for the daemon's grace time: `djinn.attach(s.id)` takes it up again."""
        self._steps.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # what happened first is what the caller must see
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.info.model}>"


class Stream:
    """An iterator over the Pieces of one call. When it has ended, `result` is what `generate` would have returned.

    Closing it early (close(), the end of its `with` block, or dropping it as `break` does) stops the work in the daemon
    and leaves the session usable, with the tokens that were generated until then.
    """

    def __init__(self, steps: StreamSteps) -> None:
        self._steps = steps

    @property
    def result(self) -> Generated:
        """Raises InvalidRequest where the stream was not read to its end."""
        return self._steps.result

    def close(self) -> None:
        self._steps.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        piece = run(self._steps.next())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attach(session: str, *, address: str | None = None) -> Session:
    """The session with this id, left by detach() or by a client that died. Raises SessionNotFound."""
    steps = SessionSteps(address)
    run(steps.attach(session))
    return Session._over(steps)
