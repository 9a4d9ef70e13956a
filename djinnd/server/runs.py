"""A run as the server lives it: what the engine tells of it, on its way to the session and to the caller.

`done` gets the final answer or the error. The session's tokens are then the engine's: those that the run left, or,
where it failed, those of before it. Where the engine is lost, `done` raises Interrupted, the session keeps its tokens,
and the run can be submitted to the next engine: see carrying.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from djinn_client.breakpoints import HitInfo
from djinn_client.errors import Cancelled, DjinnError
from djinn_client.protocol import (
    CLASSES,
    FinishReason,
    Forward,
    Generate,
    Generated,
    Logits,
    Logprobs,
    Piece,
    Sampling,
    Timings,
)
from djinnd.core.edits import FOREVER
from djinnd.messages import (
    CancelRun,
    Capture,
    Finished,
    Grammar,
    Halt,
    Hold,
    KvExported,
    LogitsReady,
    PromptScored,
    Truncate,
)
from djinnd.server.blame import Standing, Suspect
from djinnd.server.call_breakpoints import CallBreakpoints
from djinnd.server.capturing import Capturing
from djinnd.server.client import Answer, Call
from djinnd.server.engine_client import EngineClient
from djinnd.server.formats import Guide
from djinnd.server.generation import Generation
from djinnd.server.late_text import LateText
from djinnd.server.prompt_scores import PromptScores
from djinnd.server.queueing import Place
from djinnd.server.sessions import SessionRecord
from djinnd.server.text_worker import TextWorker
from djinnd.server.texts import ModelText, Prompt
from djinnd.text.detokenizer import CONTEXT_TOKENS
from djinnd.text.reader import ReadingRules

log = logging.getLogger("djinnd.server")

RunState = Literal["queued", "running", "held"]


class Interrupted(Exception):
    """The engine was lost before it had ended the run."""

    def __init__(self, error: DjinnError) -> None:
        super().__init__(error.message)
        self.error = error


class SessionRun:
    """What all kinds have in common. Made in one turn of the loop with finding the engine, so that it lives. `proven`
    is done when the engine has given it a token."""

    done: asyncio.Future[Answer]
    proven: asyncio.Future[None]

    def __init__(self, call: Call, session: SessionRecord) -> None:
        self.deaths = 0  # of engines for which this run may be to blame
        self.is_cancelled = False
        self._call = call
        self._session = session
        self._session.called(call.received)
        self._was_due_from = session.due_from
        self._was_at = session.breakpoints.hit
        self._engine: EngineClient
        self._number = 0  # of the engine's request; 0: no engine has it
        self._first = len(session.tokens)
        self._started = False
        self._held = False
        self._is_new = True  # no engine has had it
        self._is_proven = False

    def submit(self, engine: EngineClient) -> None:
        """Has this engine run it: the first one, or the next one after a loss, which has the session open with all its
        tokens."""
        loop = asyncio.get_running_loop()
        is_new, self._is_new = self._is_new, False
        self.done = loop.create_future()
        self._engine = engine
        self._session.due_from = FOREVER
        if not is_new:  # it was opened before a text worker had found the stop string
            engine.send(Truncate(self._session.id, len(self._session.tokens)))
        self._number = self._send(engine, is_new)
        if is_new:
            self._send_off()
        self.proven = loop.create_future()
        if self._held:
            engine.send(Hold(self._number, True))

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        """Sends the engine the run, and answers with its number there. Unless `is_new`, the session of the engine has
        the run's tokens already."""
        raise NotImplementedError

    @property
    def session(self) -> SessionRecord:
        return self._session

    @property
    def state(self) -> RunState:
        if self._held:
            return "held"
        return "running" if self._started else "queued"

    @property
    def standing(self) -> Standing:
        if self._held or self._session.is_paused:
            return Standing.WAITS
        return Standing.PROVEN if self._is_proven else Standing.UNPROVEN

    @property
    def suspect(self) -> Suspect:
        return Suspect(self._session.model, self._session.user)

    @property
    def is_urgent(self) -> bool:
        return self._session.priority == CLASSES[0]

    def tell(self) -> None:
        self._session.journal.write_now()
        self._call.flush()

    def cancel(self) -> None:
        """The engine's final word comes within a step; without an engine, the call ends at once."""
        self.is_cancelled = True
        if self._number:
            self._engine.send(CancelRun(self._number))
        else:
            self._call.task.cancel()

    def hold(self, held: bool) -> None:
        self._held = held
        self._session.latency.interrupted()
        if self._number:
            self._engine.send(Hold(self._number, held))

    def started(self, at: float, woken: bool) -> None:
        self._started = True
        self._session.latency.started(at, woken, self._session.priority)

    def token(self, token: int, logprobs: Logprobs | None, at: float) -> None:
        raise AssertionError(f"a token for a {type(self).__name__}")

    def prompt_scored(self, message: PromptScored) -> None:
        raise AssertionError(f"prompt log probabilities for a {type(self).__name__}")

    def finished(self, message: Finished) -> None:
        raise AssertionError(f"a {type(self).__name__} ends otherwise")

    def captured(self, message: Finished, fd: int) -> None:
        raise AssertionError(f"activations for a {type(self).__name__}")

    def logits(self, message: LogitsReady, fd: int) -> None:
        raise AssertionError(f"logits for a {type(self).__name__}")

    def exported(self, message: KvExported, fd: int) -> None:
        raise AssertionError(f"KV for a {type(self).__name__}")

    def failed(self, error: DjinnError) -> None:
        """The engine has rolled the session back. It is at the same hit again, if it was at one."""
        self._roll_back()
        self.done.set_exception(error)

    def lost(self, error: DjinnError, blamed: bool) -> None:
        """The engine is no more. `blamed`: perhaps by this run."""
        self.deaths += blamed
        self._number, self._started, self._is_proven = 0, False, False
        self._session.due_from = self._was_due_from
        self.done.set_exception(Interrupted(error))
        self.done.exception()  # its caller may have been cancelled

    def completed(self, context: int) -> Answer | None:
        """The final answer of a run that only lacked the last word of an engine that was lost. `context`: the most
        tokens that the session may have."""
        return None

    def cut_short(self) -> Answer | None:
        """It is cancelled while no engine has it. None: it has no result."""
        self.give_up()
        return None

    def give_up(self) -> None:
        """No engine will have it: the session keeps what the client was told, or is as it was before the call."""
        self._roll_back()

    def _roll_back(self) -> None:
        self._session.cut(self._first)
        self._session.breakpoints.hit, self._session.due_from = self._was_at, self._was_due_from

    def _send_off(self) -> None:
        """The engine has the run at once, and not at the end of this turn of the loop, unless other calls are on their
        way: those that come together are to be in one step."""
        if self._call.client.unfinished <= self._engine.runs:
            self._engine.flush()

    def _extend(self, tokens: Sequence[int]) -> None:
        """The session by the run's own."""
        self._session.tokens.extend(tokens)
        self._session.breakpoints.hit = None
        self._session.tenant.charge(len(tokens), time.monotonic())

    def _ended_at(self, hit: HitInfo | None) -> None:
        """Before the session is `changed`."""
        if hit is not None or self._was_at is not None:
            self._session.stopped(hit)

    def _undo(self, error: DjinnError) -> None:
        """The run has ended in the engine, but its work is not to stay."""
        self._engine.send(Truncate(self._session.id, self._first))
        self.failed(error)


class GenerateRun(SessionRun):
    def __init__(
        self,
        call: Call,
        session: SessionRecord,
        engine: EngineClient,
        place: Place,
        request: Generate,
        prompt: Prompt,
        text: ModelText,
        worker: TextWorker | None,
        capturing: Capturing | None,
        breaking: CallBreakpoints,
        guide: Guide | None = None,
    ) -> None:
        """`worker`: that reads the text of the tokens, and has the model's tokenizer; None: it is read here."""
        super().__init__(call, session)
        self._place = place
        self._request = request
        self._prompt = prompt.tokens
        self._stop_tokens = prompt.stop_tokens
        self._capturing = capturing
        self._breaking = breaking
        self._guide = guide
        self._extend(prompt.tokens)
        self._fault: BaseException | None = None
        self._halted = False
        self._late: LateText | None = None
        likeliest = request.prompt_logprobs
        self._scores = None if likeliest is None else PromptScores(len(prompt.tokens), self._first, likeliest)
        self._is_over = False  # in the engine
        self._held_by: set[str] = set()
        self._reason: FinishReason | None = None  # why it has ended, where the engine only has to say so
        seed = request.sampling.seed
        self._sampling = msgspec.structs.replace(
            request.sampling, seed=secrets.randbits(63) if seed is None else seed
        )  # for each engine that has the run
        self.submit(engine)
        try:  # while the engine has its work
            is_late, chat = worker is not None, text.reply(request, prompt)
            if chat is not None:
                rules = chat.rules
            else:
                rules = ReadingRules(request.stop, request.skip_special_tokens, request.sampling.min_tokens)
            reader = text.reader(session.tokens, rules)
            fields = (request, session.tokens, len(prompt.tokens), prompt.stop_tokens, reader, call.received)
            naming = text.token_bytes if request.token_bytes else None
            self._generation = Generation(*fields, is_late=is_late, token_bytes=naming, chat=chat)
            if worker is not None:
                context = session.tokens[-CONTEXT_TOKENS * 4 :]  # of which some have no text
                self._late = LateText(worker, text.number, context, rules, self)
        except BaseException as fault:
            self._blame(fault)
            self.cancel()

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        """What was generated before the loss of an engine is the run's own. A run that has generated all that it may,
        and captures, has it all run once more, and generates nothing."""
        request, given = self._request, 0 if is_new or self._reason else self._generated
        grammar, fds = self._grammar()
        return engine.run(
            self,
            fds=fds,
            session=self._session.id,
            tokens=list(self._prompt) if is_new else [],
            max_tokens=0 if self._reason else request.most_tokens,
            sampling=self._sampling,
            stop_tokens=list(self._stop_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=None if self._scores is None else self._scores.wanted(),
            expected_tokens=request.expected_tokens,
            deadline=self._call.received + request.deadline_s if request.deadline_s else 0.0,
            capture=[] if self._capturing is None else self._capturing.points,
            stops=self._breaking.stops,
            resume_block=None if given else self._breaking.resume_block,
            first=None if is_new else self._first,
            given=given,
            grammar=grammar,
        )

    def _grammar(self) -> tuple[Grammar | None, list[int]]:
        """With its descriptor. A run that has generated all that it may follows none any more."""
        if self._guide is None or self._reason:
            return None, []
        grammar, fd = self._guide.message()
        return grammar, [fd]

    @property
    def _generated(self) -> int:
        return len(self._session.tokens) - self._first - len(self._prompt)

    def prompt_scored(self, message: PromptScored) -> None:
        assert self._scores is not None
        self._scores.add(message)

    def started(self, at: float, woken: bool) -> None:
        super().started(at, woken)
        self._place.started(at)
        if self._fault is None:
            self._generation.started(at)

    def token(self, token: int, logprobs: Logprobs | None, at: float) -> None:
        if not self._is_proven:
            self._prove()
        if self._fault is not None:
            return
        self._session.latency.token(at, self._session.priority)
        self._session.tenant.charge(1, at)
        try:
            piece = self._generation.token(token, logprobs, at)
        except BaseException as fault:
            self._blame(fault)
            self.cancel()
            return
        if self._late is not None:
            self._late.go_on(self._generation)
        elif piece is not None or self._generation.is_full:
            self._session.changed()
        self._told(piece)

    def _told(self, piece: Piece | None) -> None:
        if piece is not None:
            self._call.send(piece)
        if self._generation.keep is not None and not self._halted:
            self._halted = True
            self._halt()

    def _halt(self) -> None:
        """A stop string is complete: the engine, if it has the run, ends it after that."""
        if self._number and self._reason is None and not self._is_over:
            assert self._generation.keep is not None
            self._engine.send(Halt(self._number, self._generation.keep))

    def submit(self, engine: EngineClient) -> None:
        super().submit(engine)
        if self._halted:
            self._halt()

    def hold(self, held: bool) -> None:
        self._hold("client", held)

    def _hold(self, who: str, held: bool) -> None:
        """It goes on when nobody holds it."""
        was = bool(self._held_by)
        (self._held_by.add if held else self._held_by.discard)(who)
        if bool(self._held_by) != was and not self._is_over:
            super().hold(not was)

    # --- what the text worker says: see LateText --------------------------------------------------------------------

    def text_came(self, text: str, stopped_after: int | None) -> None:
        piece = self._generation.heard(text, stopped_after)
        if piece is not None:
            self._session.changed()
        self._told(piece)

    def text_failed(self, error: DjinnError) -> None:
        self._fault = error
        if not self._is_over:
            self.cancel()

    def text_behind(self, is_behind: bool) -> None:
        self._hold("text", is_behind)

    def _when_read(self, then: Callable[[], None]) -> None:
        """The engine has ended the run; its last word is acted on when the text of all tokens has been read."""
        self._is_over = True
        if self._late is None or self._fault is not None:
            then()
        else:
            self._late.finish(self._generation, then)

    # --- the end ----------------------------------------------------------------------------------------------------

    def failed(self, error: DjinnError) -> None:
        self._is_over = True
        if self._late is not None:
            self._late.end()
        super().failed(error)

    def _prove(self) -> None:
        self._is_proven = True
        self.proven.set_result(None)

    def finished(self, message: Finished) -> None:
        self._when_read(lambda: self._finish(message))

    def captured(self, message: Finished, fd: int) -> None:
        self._when_read(lambda: self._finish_captured(message, fd))

    def _finish(self, message: Finished) -> None:
        reply = self._ended(message)
        if reply is not None:
            self.done.set_result(Answer(reply))

    # --- without an engine ------------------------------------------------------------------------------------------

    def lost(self, error: DjinnError, blamed: bool) -> None:
        if self._fault is None:
            super().lost(error, blamed)
        else:
            self.failed(_told_of(self._fault))

    def completed(self, context: int) -> Answer | None:
        """What is captured comes with the engine's last word, and text that a worker still reads may come until then:
        the next engine says it."""
        self._reason = self._generation.ended_by_itself(context)
        if self._reason is None or self._capturing is not None or self._late is not None:
            return None
        self._session.due_from = FOREVER
        return self._answer_without_engine(self._reason)

    def cut_short(self) -> Answer | None:
        """Tokens that nobody has read are not the session's. Raises what has failed on the text side."""
        self._end_reading()
        if self._fault is None:
            self._session.cut(self._generation.read)
            answer = self._answer_without_engine("cancelled")
            if answer is not None:
                return answer
        self._roll_back()
        raise _told_of(self._fault)

    def give_up(self) -> None:
        self._end_reading()
        told = self._generation.told
        if not told:
            self._roll_back()
            return
        self._session.cut(self._first + len(self._prompt) + told)
        self._ended_at(None)
        self._session.changed()

    def _end_reading(self) -> None:
        self._is_over = True
        if self._late is not None:
            self._late.end()

    def _answer_without_engine(self, reason: FinishReason) -> Answer | None:
        length = len(self._session.tokens)
        reply = self._reply(Finished(0, reason, length, self._generated, computed=0))
        if reply is None:
            return None
        self._keep(reply)
        return Answer(reply)

    # --- the engine's last word -------------------------------------------------------------------------------------

    def _finish_captured(self, message: Finished, fd: int) -> None:
        assert message.capture is not None
        reply, fds = self._ended(message), [fd]
        if reply is None or reply.finish_reason == "cancelled" or (message.stopped is not None and reply.hit is None):
            self._call.client.traffic.discard(fds)
            fds = []
        elif reply.hit is not None:
            reply.captured = self._breaking.told(message.capture, reply.hit)
        else:
            assert self._capturing is not None
            reply.captured = self._capturing.told(message.capture, self._positions(message.capture, reply))
        if reply is not None:
            self.done.set_result(Answer(reply, fds))

    def _positions(self, capture: Capture, reply: Generated) -> int:
        """That were captured and are the session's. The engine may have gone on before it heard of a stop string; it
        is as if it had not: the last token that it generated is not computed, unless that was what no token could
        follow."""
        length = self._generation.length
        is_run = length == self._generation.prompt_end or reply.finish_reason == "not_finite"
        computed = length if is_run else length - 1
        return min(capture.positions, computed - capture.first)

    def _ended(self, message: Finished) -> Generated | None:
        """The final reply; None where there is none, but an error."""
        reply = self._reply(message) if self._fault is None else None
        if reply is None:
            self._undo(_told_of(self._fault))
            return None
        length = self._generation.length
        if message.length != length:
            assert self._halted and message.length > length, (message, length)
            self._engine.send(Truncate(self._session.id, length))  # it ended by itself before it heard of the stop
        if reply.finish_reason == "breakpoint":  # and not by a stop string that came before
            reply.hit = self._breaking.hit(message)
        self._keep(reply)
        return reply

    def _keep(self, reply: Generated) -> None:
        """What the reply tells is the session's."""
        stays = reply.finish_reason == "cancelled" and self._generation.length == self._first
        self._ended_at(self._was_at if stays else reply.hit)
        self._session.changed()

    def _reply(self, message: Finished) -> Generated | None:
        """None: text failed."""
        computed = message.computed
        if not computed and self._generated:  # by an engine that was lost before it could tell
            computed = max(1, len(self._prompt))
        reason = self._reason if self._reason and message.reason == "length" else message.reason
        try:
            reply = self._generation.finish(reason, computed, time.monotonic())
        except BaseException as fault:
            self._blame(fault)
            return None
        if self._scores is not None:
            reply.prompt_logprobs = self._scores.told()
        return reply

    def _blame(self, fault: BaseException) -> None:
        """A panic in the tokenizer's Rust code, too, which is no Exception."""
        log.exception("token_failed session=%s", self._session.id)
        self._fault = fault


def _told_of(fault: BaseException | None) -> DjinnError:
    """What the caller is told: an error of the text side says what to do; anything else is the daemon's own."""
    if isinstance(fault, DjinnError):
        return fault
    return DjinnError(f"the daemon failed on a token of its own: {fault!r}; its log has the details")


class ForwardRun(SessionRun):
    """Cancelled, it leaves the session as it was."""

    def __init__(
        self, call: Call, session: SessionRecord, engine: EngineClient, place: Place, request: Forward
    ) -> None:
        super().__init__(call, session)
        self._place = place
        self._request = request
        self._started_at = call.received
        self._extend(request.token_ids)
        self.submit(engine)

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        return engine.run(
            self,
            session=self._session.id,
            tokens=self._request.token_ids if is_new else [],
            max_tokens=0,
            sampling=Sampling(seed=0),
            logits=True,
            first=None if is_new else self._first,
        )

    def started(self, at: float, woken: bool) -> None:
        super().started(at, woken)
        self._place.started(at)
        self._started_at = at

    def finished(self, message: Finished) -> None:
        self._undo(Cancelled("the request was cancelled"))

    def logits(self, message: LogitsReady, fd: int) -> None:
        received = self._call.received
        total = time.monotonic() - received
        timings = Timings(max(0.0, self._started_at - received), first_token=total, total=total)
        reply = Logits(id=self._call.id, tokens=message.tokens, vocab=message.vocab, timings=timings)
        self._ended_at(None)
        self._session.changed()
        self.done.set_result(Answer(reply, [fd]))
