"""Turns the tokens of one Generate into pieces, the place of a stop string, and the final reply.

No I/O and no clock. It extends the session's own list of tokens; the engine has the same.

    begin ──► token … token ──► finish        the session holds what `finish` counts
                    │
                    └─► keep is set: a stop string is complete; tokens that still come are not the session's

Tokens are decoded, and the answer of a chat parsed, here. For models that are not configured, a text worker does it:
then `is_late` is true, `take_unread` takes the tokens, and `heard` receives the worker's text.

Each token is decoded at once if a caller waits for a piece, or if the token may complete a stop string. Otherwise
READ_AT_ONCE tokens are decoded at a time, which takes little longer than one. Runs in the same steps take turns, so
that no step has much to decode, even if many calls end with it. The rest is decoded with the last token, while the
engine ends the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from djinn_client.protocol import FinishReason, Generate, Generated, Logprobs, Piece, Timings, Usage
from djinnd.jobs.text import ReadText
from djinnd.text.chat.answer import ChatAnswer
from djinnd.text.chat.reply import ChatReply
from djinnd.text.reader import TextReader
from djinnd.text.token_bytes import TokenBytes

READ_AT_ONCE = 16  # tokens: some tens of microseconds

_turns = itertools.cycle(range(READ_AT_ONCE))


class Generation:
    """`tokens` is the session's list; its last `prompt_tokens` came with the request. `reader` None: no tokenizer, so
    tokens only, or `is_late`. `chat`: the text is the answer of a chat; a ChatReply reads it here."""

    def __init__(
        self,
        request: Generate,
        tokens: list[int],
        prompt_tokens: int,
        stop_tokens: Collection[int],
        reader: TextReader | None,
        received: float,
        is_late: bool = False,
        token_bytes: TokenBytes | None = None,
        chat: ChatAnswer | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`notes`: of the first piece. `token_bytes`: the names of tokens, if the request wants them and they are read
        here."""
        self.keep: int | None = None  # generated tokens that stay, once a stop string is complete
        self.is_full = False  # the last token was the request's last
        self._request = request
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self.prompt_end = len(tokens)  # tokens of the session before the first generated one
        self._stop_tokens = stop_tokens
        self._reader = reader
        self._is_late = is_late
        self._chat = chat
        self._reply = chat if isinstance(chat, ChatReply) else None
        self._is_streamed = request.stream
        self._is_textless = reader is None and not is_late
        self._is_stopped = False  # a stop string is complete
        self._heard_stop = ""  # the stop string that the text worker has found
        self._read = self.prompt_end  # the text of tokens before this has been read
        self._asked = self.prompt_end  # tokens before this have been sent to a text worker
        may_end = bool(request.stop) or (request.chat is not None and not request.chat.parallel_tools)  # at any token
        self._read_at_once = 1 if request.stream or may_end else READ_AT_ONCE
        self._next_read = self._read + next(_turns) % self._read_at_once  # read when more tokens have come
        self._received = received
        self._started = self._first_token = 0.0
        self._told = self.prompt_end  # tokens before this have been in a piece
        self._untold: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._naming = token_bytes
        self._names_tokens = request.token_bytes
        self._token_bytes: dict[int, bytes] = {}  # the bytes that a text worker has named
        self._notes = notes
        self._named: set[int] = set()  # tokens that a piece has named

    def started(self, at: float) -> None:
        """Notes the time of the first row on the first engine."""
        self._started = self._started or at

    def token(self, token: int, logprobs: Logprobs | None, at: float) -> Piece | None:
        """Takes the next token. With `stream`, returns the piece that it completes, if any."""
        if self.keep is not None:
            return None  # the engine went on until it heard of the stop string
        if len(self._tokens) == self.prompt_end:
            self._first_token = at
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self.is_full = len(self._tokens) - self.prompt_end == self._request.most_tokens or token in self._stop_tokens
        if self._is_late:
            return None
        if len(self._tokens) > self._next_read or self.is_full:
            self._read_text()
        return self._piece() if self._is_streamed else None

    @property
    def unread(self) -> int:
        """Tokens that no text worker has been asked for yet."""
        return len(self._tokens) - self._asked

    @property
    def is_due(self) -> bool:
        """True if a text worker is to be asked now: the caller waits for the text, or enough tokens have come."""
        return len(self._tokens) > self._next_read or (self.is_full and self.unread > 0)

    def take_unread(self, most: int) -> list[int]:
        """The next tokens for the text worker, which reads one row of them at a time."""
        assert self._asked == self._read
        self._asked = min(len(self._tokens), self._read + most)
        return self._with_text(self._tokens[self._read : self._asked])

    def heard(self, read: ReadText) -> Piece | None:
        """Takes the worker's text of the tokens that it was asked for. Tokens behind the one that ended the output
        leave the session."""
        if self._chat is not None:
            self._chat.add(read.text, read.delta)
        if read.stopped_after is not None:
            self._is_stopped = True
            self._heard_stop = read.stopped_by if read.stopped_by in self._request.stop else ""
            self._asked = min(self._asked, self._read + read.stopped_after)
            del self._tokens[self._asked :]
            del self._logprobs[self._asked - self._told :]
            self.keep = self._asked - self.prompt_end
        self._note_read(self._asked, read.text)
        return self._piece() if self._is_streamed else None

    def finish(self, reason: FinishReason, computed: int, at: float, guesses: tuple[int, int] = (0, 0)) -> Generated:
        """The final reply. `computed` counts the prompt's tokens that the model ran; `guesses`, the tokens of guesses
        that it ran and those that were right."""
        if not self._is_late:
            self._read_text()
        if self._reader is not None:
            rest = self._reader.finish()
            self._untold.append(rest if self._reply is None else self._reply.feed(rest))
            self._is_stopped |= self._reader.stopped_after is not None
        if self._reply is not None:
            self._untold.append(self._reply.finish())
            self._is_stopped |= self._reply.is_stopped
        return Generated(
            id=self._request.id,
            finish_reason="stop" if self._is_stopped else reason,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                generated_tokens=len(self._tokens) - self.prompt_end,
                session_tokens=len(self._tokens),
                computed_tokens=computed,
                cached_tokens=max(0, self.prompt_end - computed),
                guessed_tokens=guesses[0],
                kept_tokens=guesses[1],
            ),
            timings=Timings(
                queued=max(0.0, self._started - self._received) if self._started else 0.0,
                first_token=self._first_token - self._received if self._first_token else 0.0,
                total=at - self._received,
            ),
            stopped_by=self._stopped_by,
            message=None if self._chat is None else self._chat.message,
            **self._take(),
        )

    @property
    def _stopped_by(self) -> str:
        """The stop string; "" if there was none."""
        read_by = self._reply or self._reader
        return read_by.stopped_by if read_by is not None else self._heard_stop

    def ended_by_itself(self, context: int) -> FinishReason | None:
        """The reason why the run has no further token, with this room in the session. None: it has one."""
        if self.keep is not None:
            return "stop"
        if len(self._tokens) == self.prompt_end:
            return None
        if self._tokens[-1] in self._stop_tokens:
            return "stop"
        return "length" if self.is_full or len(self._tokens) >= context else None

    @property
    def told(self) -> int:
        """Generated tokens that pieces have brought."""
        return self._told - self.prompt_end

    @property
    def read(self) -> int:
        """Tokens of the session whose text has been read. Without a worker all count, as the server can read any
        time."""
        return self._read if self._is_late else len(self._tokens)

    @property
    def length(self) -> int:
        """Tokens in the session, as this side counts."""
        return len(self._tokens)

    def _read_text(self) -> None:
        """Reads the text of all tokens so far."""
        reader, end = self._reader, len(self._tokens)
        tokens = self._with_text(self._tokens[self._read :])
        text = reader.read(tokens) if reader is not None and tokens else ""
        self._note_read(end, text if self._reply is None else self._reply.feed(text, self._may_stop(end)))
        if (reader is not None and reader.stopped_after is not None) or (
            self._reply is not None and self._reply.is_stopped
        ):
            self.keep = end - self.prompt_end

    def _may_stop(self, end: int) -> bool:
        """True if a stop string that the token before `end` completes ends the output."""
        return end - self.prompt_end > self._request.sampling.min_tokens

    def _with_text(self, tokens: list[int]) -> list[int]:
        """Leaves out stop tokens, which belong to the session but have no text."""
        return [token for token in tokens if token not in self._stop_tokens]

    def _note_read(self, end: int, text: str) -> None:
        self._read = end
        self._next_read = end + self._read_at_once - 1
        if text:
            self._untold.append(text)

    def _piece(self) -> Piece | None:
        if self._untold or self._is_textless or (self._chat is not None and self._chat.has_delta):
            notes, self._notes = self._notes, ()
            return Piece(id=self._request.id, **self._take(), notes=[*notes])
        return None

    def _take(self) -> dict[str, Any]:
        """Takes the content for the next piece: everything since the last piece whose text has been read."""
        count = self._read - self._told
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        taken: dict[str, Any] = {
            "text": "".join(self._untold),
            "token_ids": self._tokens[self._told : self._read],
            "logprobs": logprobs,
        }
        if self._names_tokens:
            taken["token_bytes"] = self._bytes_of(_ids(taken["token_ids"], logprobs) - self._named)
        if self._chat is not None:
            taken["delta"] = self._chat.take_delta()
        self._untold, self._told = [], self._read
        return taken

    # --- the bytes of tokens, for requests that want them -----------------------------------------------------------

    def unnamed(self) -> list[int]:
        """Tokens that a text worker is to name with those that it is asked to read now."""
        if not self._names_tokens:
            return []
        entries = self._logprobs[self._read - self._told : self._asked - self._told]
        return [*(_ids(self._tokens[self._read : self._asked], entries) - self._token_bytes.keys())]

    def name(self, token_bytes: dict[int, bytes]) -> None:
        """Takes the bytes of the tokens that a text worker was asked to name."""
        self._token_bytes |= token_bytes

    def _bytes_of(self, tokens: set[int]) -> dict[int, bytes]:
        self._named |= tokens
        if self._naming is not None:
            return self._naming.of(tokens)
        return {token: self._token_bytes[token] for token in tokens}


def _ids(tokens: Iterable[int], entries: Iterable[Logprobs]) -> set[int]:
    """These tokens, and the tokens that the entries name."""
    return {*tokens, *(token for entry in entries for token in entry.top)}
