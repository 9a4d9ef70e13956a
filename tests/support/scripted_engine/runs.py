"""Runs of the scripted engine's sessions: a step gives each of them a token, or ends it."""

from __future__ import annotations

import os
import signal
import time

from djinn_client.protocol import Logprobs
from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.core.edits import FOREVER
from djinnd.core.stops import next_stop
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.models import Models
from tests.support.scripted_engine.results import captured, constant_rows, prompt_scores
from tests.support.scripted_engine.script import Script
from tests.support.scripted_engine.session import Session


class Runs:
    def __init__(self, script: Script, channel: Channel, models: Models, sessions: dict[str, Session]) -> None:
        self._script = script
        self._channel = channel
        self._models = models
        self._sessions = sessions
        self.steps = 0

    @property
    def is_busy(self) -> bool:
        return any(session.runs for session in self._sessions.values())

    def step(self) -> None:
        self.steps += 1
        tokens, started, over = [], [], []
        for session in [session for session in self._sessions.values() if session.runs]:
            run = session.run
            assert run is not None
            if not session.is_started:
                session.is_started = True
                started.append(messages.Started(run.request, time.monotonic()))
                if self._makes_trouble(session, run):
                    continue
                for scores in prompt_scores(session):
                    self._channel.send(scores)
            if run.logits:
                self._answer_logits(session, run)
                continue
            token, reason = self._advance(session, run)
            if token is not None:
                tokens.append(token)
            if reason:
                over.append((session, reason))
        if started:
            self._channel.send(messages.Stepping(started))
        if tokens:
            self._channel.send(messages.Stepped(tokens))
        for session, reason in over:
            self.finish(session, reason)

    def _advance(self, session: Session, run: messages.Run) -> tuple[messages.Token | None, str]:
        """→ the next token, None if there is none; and why the run ends here, "" if it goes on."""
        stop = next_stop(session.stops, len(session.tokens))
        if stop is not None:
            session.computed, session.stage = stop.position, stop.block
            return None, "breakpoint"
        session.computed = len(session.tokens)
        if not run.max_tokens:
            return None, "length"
        at = len(session.tokens) + session.shift(len(session.tokens) - 1)
        token = self._script.story[at % len(self._script.story)]
        session.tokens.append(token)
        logprobs = None
        if run.logprobs is not None:
            logprobs = Logprobs(-0.5, {t: -float(t) for t in range(run.logprobs)})
        reason = ""
        if token in run.stop_tokens:
            reason = "stop"
        elif session.generated == run.max_tokens or len(session.tokens) == self._script.context:
            reason = "length"
        return messages.Token(run.request, token, logprobs), reason

    def _makes_trouble(self, session: Session, run: messages.Run) -> bool:
        """Makes the trouble that the script wants for the prompt. → True if the run has failed."""
        prompt = session.tokens[session.first : session.prompt_end]
        match self._script.on_token.get(str(prompt[0]) if prompt else ""):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "garbage":
                self._channel.socket.sendall(b"this is no frame at all")
            case "fail":
                del session.tokens[session.first :]
                session.run = None
                self._channel.fail(run.request, "out_of_memory", "the step ran out of memory", bytes=7)
                return True
            case None:
                pass
            case what:
                raise AssertionError(what)
        return False

    def finish(self, session: Session, reason: str) -> None:
        run = session.run
        assert run is not None
        session.run, session.held = None, False
        length, computed = len(session.tokens), session.prompt_end - session.first
        finished = messages.Finished(run.request, reason, length, session.generated, computed)  # type: ignore[arg-type]
        if reason == "breakpoint":
            finished.stopped, session.seen_from = session.stage, session.computed
            seen, positions, more = [Point("resid", session.stage)], length - session.computed, 0
        elif run.capture:  # also after a cancellation
            positions = length - session.seen_from - (session.generated > 0)
            seen, more = run.capture, max(run.max_tokens - 1, 0)
        else:
            self._channel.send(finished)
            return
        points = self._models.infos[session.model].points
        assert points is not None
        finished.capture, data = captured(points, session, seen, positions, more)
        self._channel.send_window(finished, data)

    def _answer_logits(self, session: Session, run: messages.Run) -> None:
        """Logits [tokens, vocab]: all entries of a row are the row's token."""
        vocab = self._models.infos[session.model].vocab
        asked = session.tokens[session.first :]
        session.run = None
        ready = messages.LogitsReady(run.request, len(asked), vocab)
        self._channel.send_window(ready, constant_rows(asked, vocab))

    # --- messages -----------------------------------------------------------------------------------------------------

    def on_run(self, run: messages.Run) -> None:
        session = self._sessions[run.session]
        assert session.run is None
        assert run.sampling.seed is not None
        session.run, session.is_started = run, False
        session.first = len(session.tokens) if run.first is None else run.first
        session.tokens += run.tokens
        session.prompt_end = len(session.tokens) - run.given
        again = session.first if session.prompt_end > session.first else max(session.first - 1, 0)
        session.seen_from, session.due_from = min(again, session.due_from), FOREVER
        session.computed = min(session.computed, again)
        session.stops = tuple(run.stops)
        if run.resume_block is not None:
            assert not run.tokens and not run.capture
            assert all(stop.block > run.resume_block or stop.position >= session.first for stop in run.stops)

    def on_cancelrun(self, message: messages.CancelRun) -> None:
        for session in self._running(message.request):
            self.finish(session, "cancelled")

    def on_halt(self, message: messages.Halt) -> None:
        for session in self._running(message.request):
            del session.tokens[session.prompt_end + message.keep :]
            self.finish(session, "stop")

    def on_hold(self, message: messages.Hold) -> None:
        for session in self._running(message.request):
            session.held = message.held

    def _running(self, request: int) -> list[Session]:
        """The session of this request, or none if the request has ended."""
        return [session for session in self._sessions.values() if session.run and session.run.request == request]

    def on_close(self, message: messages.Close) -> None:
        session = self._sessions[message.session]
        if session.run is not None:
            self.finish(session, "cancelled")
        del self._sessions[message.session]
