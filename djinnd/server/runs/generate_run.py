"""The run of a Generate: turns its tokens into text and pieces for the client, and into a final reply."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from djinn_client.errors import DjinnError
from djinn_client.protocol import FinishReason, Generate, Generated, Logprobs, Piece
from djinnd.core.edits import FOREVER
from djinnd.jobs.text import ChatReading, ReadText
from djinnd.messages import CaptureLayout, Finished, Grammar, Halt, PromptScored, Truncate
from djinnd.server.admission.captures import CallCapture
from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.models.text import ModelText, TokenizedPrompt
from djinnd.server.quotas.queueing import QueuePlace
from djinnd.server.runs.prompt_scores import ReceivedScores
from djinnd.server.runs.runs import SessionRun
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.text.formats import Guide
from djinnd.server.text.generation import Generation
from djinnd.server.text.text_worker import TextWorker
from djinnd.server.text.worker_reading import WorkerReading
from djinnd.server.whitebox.call_breakpoints import CallBreakpoints
from djinnd.server.wire.call import ClientCall, FinalReply
from djinnd.text.chat.reply import ChatReply
from djinnd.text.detokenizer import CONTEXT_TOKENS
from djinnd.text.reader import ReadingRules

log = logging.getLogger("djinnd.server")


class GenerateRun(SessionRun):
    """One generation, which may continue on another engine after the loss of the first."""

    def __init__(
        self,
        call: ClientCall,
        session: SessionRecord,
        engine: EngineClient,
        place: QueuePlace,
        request: Generate,
        prompt: TokenizedPrompt,
        text: ModelText,
        worker: TextWorker | None,
        capture: CallCapture | None,
        breakpoints: CallBreakpoints,
        guide: Guide | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`notes`: of the first piece. `worker`: the text worker that has the model's tokenizer and detokenises; None:
        the server detokenises."""
        super().__init__(call, session)
        self._place = place
        self._request = request
        self._prompt = prompt.tokens
        self._stop_tokens = prompt.stop_tokens
        self._capture = capture
        self._breakpoints = breakpoints
        self._guide = guide
        self._notes = notes
        self._extend(prompt.tokens)
        self._fault: BaseException | None = None
        self._halted = False
        self._late: WorkerReading | None = None
        likeliest = request.prompt_logprobs
        self._scores = None if likeliest is None else ReceivedScores(len(prompt.tokens), self._first, likeliest)
        self._is_over = False  # the engine has ended it
        self._held_by: set[str] = set()
        self._reason: FinishReason | None = None  # why it has ended, if only the engine's Finished is missing
        seed = request.sampling.seed
        self._sampling = msgspec.structs.replace(
            request.sampling, seed=secrets.randbits(63) if seed is None else seed
        )  # the same on each engine that has the run
        self.submit(engine)
        try:  # while the engine computes
            self._begin_reading(prompt, text, worker)
        except BaseException as fault:
            self._blame(fault)
            self.cancel()

    def _begin_reading(self, prompt: TokenizedPrompt, text: ModelText, worker: TextWorker | None) -> None:
        """Prepares the text of the tokens to come: how it is read, here or by the worker."""
        request, tokens = self._request, self._session.tokens
        chat, least = text.answer(request, prompt), request.sampling.min_tokens
        if chat is None:
            rules = ReadingRules(request.stop, request.skip_special_tokens, least)
        else:
            rules = chat.rules if isinstance(chat, ChatReply) else ReadingRules([], least=least)
        reader = text.reader(tokens, rules)
        fields = (request, tokens, len(prompt.tokens), prompt.stop_tokens, reader, self._call.received)
        naming = text.token_bytes if request.token_bytes else None
        self._generation = Generation(
            *fields, is_late=worker is not None, token_bytes=naming, chat=chat, notes=self._notes
        )
        if worker is not None:
            context = tokens[-CONTEXT_TOKENS * 4 :]  # more than CONTEXT_TOKENS, as some have no text
            self._late = WorkerReading(worker, text.number, context, rules, _chat_reading(request, prompt), self)

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        """Sends the run to an engine. Tokens generated before the loss of an engine are part of the run. A run that has
        generated all its tokens and still captures is computed once more, and generates nothing."""
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
            between_tokens=request.between_tokens_s,
            first_token=request.first_token_s,
            deadline=self._call.received + request.deadline_s if request.deadline_s else 0.0,
            capture=[] if self._capture is None else self._capture.points,
            stops=self._breakpoints.stops,
            resume_block=None if given else self._breakpoints.resume_block,
            first=None if is_new else self._first,
            given=given,
            grammar=grammar,
        )

    def _grammar(self) -> tuple[Grammar | None, list[int]]:
        """The grammar, with its descriptor. A run that has generated all its tokens needs none."""
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
            self._is_proven = True
            self.proven.set_result(None)
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
        """Ends the run in the engine after a stop string is complete, if an engine has the run."""
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
        """Holds the run for one of several reasons. It continues when no reason is left."""
        was = bool(self._held_by)
        (self._held_by.add if held else self._held_by.discard)(who)
        if bool(self._held_by) != was and not self._is_over:
            super().hold(not was)

    # --- events of the text worker: see WorkerReading -----------------------------------------------------------------

    def text_came(self, read: ReadText) -> None:
        piece = self._generation.heard(read)
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
        """Called when the engine has ended the run. Calls `then` when the text of all tokens has been read."""
        self._is_over = True
        if self._late is None or self._fault is not None:
            then()
        else:
            self._late.finish(self._generation, then)

    # --- events of the engine -----------------------------------------------------------------------------------------

    def failed(self, error: DjinnError) -> None:
        self._end_reading()
        super().failed(error)

    def finished(self, message: Finished) -> None:
        self._when_read(lambda: self._finish(message))

    def captured(self, message: Finished, fd: int) -> None:
        self._when_read(lambda: self._finish_captured(message, fd))

    def _finish(self, message: Finished) -> None:
        reply = self._ended(message)
        if reply is not None:
            self.done.set_result(FinalReply(reply))

    # --- without an engine --------------------------------------------------------------------------------------------

    def lost(self, error: DjinnError, blamed: bool) -> None:
        if self._fault is None:
            super().lost(error, blamed)
        else:
            self.failed(_client_error(self._fault))

    def completed(self, context: int) -> FinalReply | None:
        """Returns the answer if the run needs no other engine. A capture, or text that a worker still reads, needs the
        next engine's Finished."""
        self._reason = self._generation.ended_by_itself(context)
        if self._reason is None or self._capture is not None or self._late is not None:
            return None
        self._session.due_from = FOREVER
        return self._answer_without_engine(self._reason)

    def cut_short(self) -> FinalReply | None:
        """Ends the run after a cancellation: cuts tokens whose text has not been read. Raises the error of the text
        side, if it has failed."""
        self._end_reading()
        if self._fault is None:
            self._session.cut(self._generation.read)
            answer = self._answer_without_engine("cancelled")
            if answer is not None:
                return answer
        self._roll_back()
        raise _client_error(self._fault)

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

    def _answer_without_engine(self, reason: FinishReason) -> FinalReply | None:
        length = len(self._session.tokens)
        reply = self._reply(Finished(0, reason, length, self._generated, computed=0))
        if reply is None:
            return None
        self._keep(reply)
        return FinalReply(reply)

    # --- the final reply ----------------------------------------------------------------------------------------------

    def _finish_captured(self, message: Finished, fd: int) -> None:
        assert message.capture is not None
        reply, fds = self._ended(message), [fd]
        if reply is None or reply.finish_reason == "cancelled" or (message.stopped is not None and reply.hit is None):
            self._call.client.traffic.discard(fds)
            fds = []
        elif reply.hit is not None:
            reply.captured = self._breakpoints.told(message.capture, reply.hit)
        else:
            assert self._capture is not None
            reply.captured = self._capture.told(message.capture, self._positions(message.capture, reply))
        if reply is not None:
            self.done.set_result(FinalReply(reply, fds))

    def _positions(self, capture: CaptureLayout, reply: Generated) -> int:
        """Number of captured positions that belong to the session. The engine may have gone on before it received the
        Halt; further positions do not count. The last generated token is not computed, unless no token could follow it
        (not_finite)."""
        length = self._generation.length
        is_run = length == self._generation.prompt_end or reply.finish_reason == "not_finite"
        computed = length if is_run else length - 1
        return min(capture.positions, computed - capture.first)

    def _ended(self, message: Finished) -> Generated | None:
        """The final reply; None if the run ends with an error."""
        reply = self._reply(message) if self._fault is None else None
        if reply is None:
            self._undo(_client_error(self._fault))
            return None
        length = self._generation.length
        if message.length != length:
            assert self._halted and message.length > length, (message, length)
            self._engine.send(Truncate(self._session.id, length))  # it ended before it received the Halt
        if reply.finish_reason == "breakpoint":  # and no stop string came before
            reply.hit = self._breakpoints.hit(message)
        self._keep(reply)
        return reply

    def _keep(self, reply: Generated) -> None:
        """Records the reply's result in the session."""
        stays = reply.finish_reason == "cancelled" and self._generation.length == self._first
        self._ended_at(self._was_at if stays else reply.hit)
        self._session.changed()

    def _reply(self, message: Finished) -> Generated | None:
        """Builds the final reply; None if the text side failed."""
        computed = message.computed
        if not computed and self._generated:  # an engine computed them that was lost before it could report
            computed = max(1, len(self._prompt))
        reason = self._reason if self._reason and message.reason == "length" else message.reason
        try:
            reply = self._generation.finish(reason, computed, time.monotonic(), (message.guessed, message.kept))
        except BaseException as fault:
            self._blame(fault)
            return None
        if self._scores is not None:
            reply.prompt_logprobs = self._scores.told()
        return reply

    def _blame(self, fault: BaseException) -> None:
        """Records a fault of the text side, also a panic of the tokenizer's Rust code, which is no Exception."""
        log.exception("token_failed session=%s", self._session.id)
        self._fault = fault


def _chat_reading(request: Generate, prompt: TokenizedPrompt) -> ChatReading | None:
    """The chat's settings that a text worker needs to parse the answer; None if the request is no chat."""
    chat = request.chat
    if chat is None:
        return None
    tools = b"" if chat.tool_choice == "none" else chat.tools
    return ChatReading(prompt.tail, tools, request.stop, chat.parallel_tools)


def _client_error(fault: BaseException | None) -> DjinnError:
    """The client's error: an error of the text side is passed on; any other fault is the daemon's own."""
    if isinstance(fault, DjinnError):
        return fault
    return DjinnError(f"the daemon failed to turn a token into text: {fault!r}; its log has the details")
