"""Makes the output of requests follow their grammars: allows only some tokens in each step, and appends forced ones.

    Run with a grammar ─► Begin ─┬─────────────► state ──► mask ─► a token is chosen ─► Advance ─┐
                                 │ the process     ▲                                             │ beside the
                                 └ compiles it     └─────────────── the process ◄────────────────┘ next step

Masks come while the device runs the step that needs them. A row whose mask is late gets no token: its request is held
until the mask is there, and then its last token is run again. So a slow grammar delays other requests by at most
PATIENCE, and not in every step.

A guess of a request's next tokens needs a mask behind each of them, too. The process is asked for these when the step
has been composed (`try_guesses`), and computes them beside the step. Only samples with a mask count. A guess that the
grammar forbids ends where it does so, because its next token is masked.

Forced tokens, the only ones that can come next, are appended between two steps and run in one chunk. Until that is
possible, steps choose them one after another, whatever the model says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from djinn_client.errors import Busy, DjinnError, GrammarRejected, TextFailed
from djinnd import messages
from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.grammar.process import GrammarProcess
from djinnd.engine.grammar.processes import GrammarProcesses
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.tuning import LOOK_EVERY, PATIENCE
from djinnd.jobs.grammar import WORD, AdvanceGrammars, BeginGrammar, EndGrammar, GrammarStates, TryTokens
from djinnd.model.sampling.sampler import Sampled
from djinnd.model.sampling.token_masks import RowMasks
from djinnd.scheduler.scheduler import Scheduler

_HOLDER = "grammar"


@dataclass(slots=True, eq=False)
class Guided:
    """A request with a grammar, and the grammar's state. `forced`: the only tokens that can come next. `is_plain`:
    forced tokens may be appended without a step, because the caller asked for tokens only."""

    request: Request
    session: Session
    process: GrammarProcess
    slot: int
    is_plain: bool
    asked: float = 0.0  # when the last token was sent to the process
    is_held: bool = False
    forced: list[int] = field(default_factory=list)
    ended: bool = False  # the output ends after `forced`
    error: str = ""
    lent: list[int] = field(default_factory=list)  # slots for the masks behind the tokens of this step's guess
    tried: int | None = None  # how many of them are filled; None: the process has not answered

    @property
    def may_go_on(self) -> bool:
        return not self.error and (bool(self.forced) or not self.ended)

    @property
    def mask(self) -> npt.NDArray[np.uint32]:
        """[words]: a bit for each token, 1 if it may come next."""
        row: npt.NDArray[np.uint32] = self.process.masks[self.slot]
        if self.forced:
            row = np.zeros_like(row)
            row[self.forced[0] // WORD] = 1 << self.forced[0] % WORD
        return row


@dataclass(eq=False)
class Guidance:
    """The requests with a grammar. Used by the engine's thread. Steps without a grammar do no work here."""

    _scheduler: Scheduler
    _channel: ServerChannel
    _processes: GrammarProcesses
    _fail: Callable[[Request, DjinnError], None]  # sends a request's final reply, as does `_finish`
    _finish: Callable[[Request | None], None]
    appended: int = field(init=False, default=0)  # number of forced tokens appended so far without a step
    _runs: dict[int, Guided] = field(init=False, default_factory=dict)  # by request
    # Sets of request numbers.
    _due: set[int] = field(init=False, default_factory=set)  # the process has not answered for the last token yet
    # the last mask was late, so the next step does not wait for this request's mask
    _slow: set[int] = field(init=False, default_factory=set)
    _late: set[int] = field(init=False, default_factory=set)  # the mask of this step is late
    _to_act: dict[int, Guided] = field(init=False, default_factory=dict)  # requests with work for `_act`
    _trying: dict[int, Guided] = field(init=False, default_factory=dict)  # requests with a guess in this step
    _looked: float = field(init=False, default=0.0)  # time of the last look at the processes

    def __bool__(self) -> bool:
        return bool(self._runs)

    # --- requests begin and end -------------------------------------------------------------------------------------

    def begin(self, session: Session, request: Request, message: messages.Run, vocab: int) -> None:
        """Starts to follow the request's grammar. Raises Busy or TextFailed if no process is available."""
        grammar = message.grammar
        assert grammar is not None
        process = self._processes.get((session.tenant, grammar.tokenizer), grammar, vocab)
        if not process.free:
            raise Busy("all masks of your grammars are in use: try again when a call has ended", retry_s=1.0)
        is_plain = request.logprobs is None and not request.capture and not request.logits
        run = Guided(request, session, process, process.free.pop(), is_plain)
        self._runs[request.id] = run
        self._due.add(request.id)
        given = session.tokens[len(session.tokens) - message.given :] if message.given else []
        process.ask(BeginGrammar(request.id, run.slot, grammar.text, given), [request.id])

    def forget(self, request: Request) -> None:
        """Called when the request has ended."""
        run = self._runs.pop(request.id, None)
        if run is None:
            return
        self._to_act.pop(request.id, None)
        self._due.discard(request.id)
        self._slow.discard(request.id)
        process = run.process
        process.forget(request.id)
        process.free.append(run.slot)
        self._trying.pop(request.id, None)
        process.free += run.lent
        process.idle_since = time.monotonic()
        if not process.failure:
            process.ask(EndGrammar(request.id))

    def close(self) -> None:
        self._processes.close()

    # --- between steps ----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Acts on the processes' answers. Called before a step is composed."""
        if not self._processes:
            return
        for process in self._processes:
            self._take(process.read_answers())
            if process.failure:
                self._retire(process)
        if self._to_act:
            self._act([*self._to_act.values()])
        now = time.monotonic()
        if now - self._looked > LOOK_EVERY:
            self._looked = now
            for process in self._processes.look_after(now, {run.process for run in self._runs.values()}):
                self._retire(process)

    def _act(self, runs: Sequence[Guided]) -> None:
        """Appends forced tokens and ends requests, if that is possible now. One message reports all appended tokens to
        the server, before the replies of requests that they end."""
        tokens: list[messages.Token] = []
        ended: list[Request] = []
        for run in runs:
            if not run.error:
                tokens += self._append(run, ended)
        if tokens:
            self.appended += len(tokens)
            self._channel.send(messages.Stepped(tokens))
        for request in ended:
            self._finish(request)
        for run in runs:
            if run.request.id in self._to_act:
                self._end(run)

    def _append(self, run: Guided, ended: list[Request]) -> list[messages.Token]:
        """Appends the run's forced tokens, and returns them. If the request ends with them, it is added to `ended`."""
        request = run.request
        if run.is_held and request.id not in self._due:
            run.is_held = False
            self._scheduler.release(request.id, _HOLDER)
        if not (run.forced and run.is_plain and len(run.session.tokens) > request.prompt_end):
            return []
        appended, over = self._scheduler.force(request.id, run.forced)
        del run.forced[: len(appended)]
        if over is not None:
            ended.append(over)
        return [messages.Token(request.id, token) for token in appended]

    def _end(self, run: Guided) -> None:
        """Ends the request, if its grammar has failed or allows nothing more."""
        request = run.request
        if run.error:
            self._fail(request, GrammarRejected(run.error, field="format"))
        elif not run.forced:
            del self._to_act[request.id]
            if run.ended:
                self._finish(self._scheduler.halt(request.id, len(run.session.tokens) - request.prompt_end))

    def _take(self, heard: GrammarStates) -> None:
        """Notes answers, which may come during a step. `_act` appends tokens and ends requests between two steps."""
        self._due.difference_update(heard.plain)
        for number, count in heard.tried:
            if number in self._trying:  # otherwise the request has ended, or its step is over
                self._trying[number].tried = count
        for state in heard.others:
            run = self._runs[state.run]
            self._due.discard(state.run)
            run.forced, run.ended, run.error = state.forced, state.ended, state.error
            self._to_act[state.run] = run
        for number in self._slow.difference(self._due):
            run = self._runs[number]
            if run.is_held:
                self._to_act[number] = run
            if time.monotonic() - run.asked <= PATIENCE:
                self._slow.discard(number)

    def _retire(self, process: GrammarProcess) -> None:
        """Fails the runs of a process that has failed. The next run gets another process."""
        self._processes.retire(process)
        error = TextFailed(f"{process.failure}; the calls that it served have ended: simplify the format, or try again")
        for run in [run for run in self._runs.values() if run.process is process]:
            self._fail(run.request, error)

    # --- in a step --------------------------------------------------------------------------------------------------

    def try_guesses(self, batch: Batch) -> None:
        """Asks for the masks behind the guesses of a step that is about to run."""
        asked: dict[GrammarProcess, list[tuple[int, list[int], list[int]]]] = {}
        for row in batch.rows:
            run = self._runs.get(row.request.id) if row.guess else None
            if run is not None and not run.forced and len(run.process.free) >= len(row.guess):
                run.lent, run.tried = [run.process.free.pop() for _ in row.guess], None
                self._trying[row.request.id] = run
                asked.setdefault(run.process, []).append((row.request.id, [*row.guess], run.lent))
        for process, guesses in asked.items():
            process.ask(TryTokens(batch.step, guesses))

    def masks(self, rows: Sequence[Row], meanwhile: Callable[[], bool]) -> RowMasks | None:
        """The masks of the rows with a grammar, without late ones. All rows are about to get a token. `meanwhile` does
        other work while the device runs; it is called if a mask is not there yet."""
        guided = [(index, run) for index, row in enumerate(rows) if (run := self._runs.get(row.request.id))]
        if not guided:
            return None
        due = self._due.intersection([run.request.id for _, run in guided])
        self._await(due - self._slow, meanwhile)
        self._late = {n for _, run in guided if (n := run.request.id) in self._due or not run.may_go_on}
        first = [*accumulate([1 + len(row.guess) for row in rows], initial=0)]  # sample of each row
        samples, words, guessed = list[int](), list[npt.NDArray[np.uint32]](), dict[int, int]()
        for index, run in guided:
            if run.request.id in self._late:
                continue
            samples.append(first[index])
            words.append(run.mask)
            if rows[index].guess:
                guessed[index] = count = self._count_tried(run)
                samples += range(first[index] + 1, first[index] + 1 + count)
                words += [run.process.masks[slot] for slot in run.lent[:count]]
        return RowMasks(samples, words, guessed) if samples else None

    def _count_tried(self, run: Guided) -> int:
        """How many masks the run's guess has. A request gets no more guesses if its process answers too late."""
        if run.request.id not in self._trying or run.forced:
            return 0
        if run.tried is None:
            run.request.may_guess = False
        return run.tried or 0

    def _await(self, due: set[int], meanwhile: Callable[[], bool]) -> None:
        """Waits at most PATIENCE for the masks of these requests, and of guesses."""
        due = due.union(self._trying)
        self._read_answers(due)
        if self._awaited(due):
            meanwhile()
        until = time.monotonic() + PATIENCE
        while (due := self._awaited(due)) and (rest := until - time.monotonic()) > 0:
            wait({self._runs[number].process.fd for number in due}, rest)
            self._read_answers(due)

    def _awaited(self, due: set[int]) -> set[int]:
        """The requests among `due` that may still get a mask."""
        unanswered = {number for number, run in self._trying.items() if run.tried is None}
        return {number for number in due & (self._due | unanswered) if not self._runs[number].process.failure}

    def _read_answers(self, due: set[int]) -> None:
        for process in {self._runs[number].process for number in due}:
            self._take(process.read_answers())

    def settle(self, rows: Sequence[Row], sampled: Sampled) -> Sampled:
        """Notes in `sampled` which rows get no token from this step, because their masks were late. For the other rows,
        the processes begin to compute the next masks."""
        late, advances = [*sampled.late], dict[GrammarProcess, list[tuple[int, list[int]]]]()
        tokenless, now = {*sampled.unsound, *sampled.late}, time.monotonic()
        self._take_back_slots()
        for index, row in enumerate(rows):
            number = row.request.id
            run = self._runs.get(number)
            if run is None or index in tokenless:
                continue
            if number in self._late:
                late.append(index)
            elif run.forced and run.forced[0] != sampled.tokens[index]:
                run.error = "the format demands a token that min_tokens or logit_bias rule out"
                self._to_act[number] = run
                late.append(index)
            elif run.forced:
                del run.forced[0]
            else:
                run.asked = now
                further = [token for token, _ in sampled.further.get(index, ())]
                advances.setdefault(run.process, []).append((number, [sampled.tokens[index], *further]))
        for process, tokens in advances.items():
            numbers = [number for number, _ in tokens]
            process.ask(AdvanceGrammars(tokens), numbers)
            self._due.update(numbers)
        if not late:
            return sampled
        kept = {index: some for index, some in sampled.further.items() if index not in late}
        return replace(sampled, late=late, further=kept)

    def _take_back_slots(self) -> None:
        for run in self._trying.values():
            run.process.free += run.lent
            run.lent = []
        self._trying.clear()

    def hold_back(self) -> None:
        """Called after a step. Holds the requests with late masks: each gets no row until its mask is there. A request
        that was late the last time is held at once, while its next mask is computed."""
        self._slow |= self._late & self._due
        self._late = set()
        for number in self._slow & self._due:
            run = self._runs[number]
            if not run.is_held:
                run.is_held = True
                self._scheduler.hold(number, _HOLDER)
