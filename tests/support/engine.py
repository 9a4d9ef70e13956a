"""A scripted engine for tests of the server: a real process that speaks djinnd.messages over its end of a socket pair.

It computes nothing. The token at position p of any session is `story[p % len(story)]`, so a test knows the tokens of
every session. An edit of position p - 1 shifts that token by the edit's number. It also shifts the captured
activations, which have the position in all columns. The engine stops before blocks like a real one. Other behaviour is
scripted in a JSON file (`Script`), by the first token of a prompt, so that one tenant can have trouble beside others
without. With `gate`, a FIFO, the engine runs a step for each byte that a test writes into it; otherwise it does not
wait.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import posix_ipc

from djinn_client.protocol import FrameDecoder, Logprobs, ModelInfo, Span
from djinn_client.protocol.fields.placing import ModelPlan, Placing
from djinn_client.protocol.fields.points import Point, PointMap
from djinn_client.transport.shm import new_window
from djinnd import messages
from djinnd.core.edits import FOREVER, Edit, cut, ended
from djinnd.core.stops import Stop, next_stop
from djinnd.messages import MAX_FRAME
from djinnd.server.arenas.header import HEADER_BYTES

BLOCKS = 8
BLOCK_BYTES = 1 << 13
WEIGHT_BYTES = BLOCKS * BLOCK_BYTES
RING_BYTES = 3 * BLOCK_BYTES
BUDGET = 1 << 30
WIDTH = 8  # of activations
PAGE_SIZE = 16  # tokens
LATE_S = 1.0
PAGE_BYTES = 1 << 12


class Script(msgspec.Struct):
    """Trouble by its trigger. `on_token`: when the first row of a prompt with this first token runs. `on_load`: when a
    model of this name is loaded. `on_start`: when an engine finds that many marks in `marks`."""

    story: list[int] = msgspec.field(default_factory=lambda: [1, 2, 3])
    context: int = 256
    gate: str = ""
    alive_s: float = 0.05
    on_token: dict[str, str] = {}  # token: die, hang, garbage, fail
    on_load: dict[str, str] = {}  # model: die, fail, full, big, late (after LATE_S)
    pages: int = 0  # bytes of the host tier of each model, unless its Load names them
    on_shutdown: str = ""  # hang; linger: finishes its work and does not exit
    keep_host: bool = True  # False: gives back a model's arena after its load
    on_start: dict[str, str] = {}  # nth start: die, refuse, hang
    marks: str = ""  # a file that gets one byte for each start


@dataclass
class Session:
    model: str
    tenant: int
    tokens: list[int] = field(default_factory=list)
    run: messages.Run | None = None
    first: int = 0
    prompt_end: int = 0
    held: bool = False
    paused: str = ""  # the tier
    waits: bool = False
    wait_of: str = ""  # the tool, and the expected seconds
    priority: str = ""  # class set while it was open
    is_started: bool = False
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER
    seen_from: int = 0  # first position that the run captures
    computed: int = 0
    stage: int = 0  # block before which the last run stopped
    stops: tuple[Stop, ...] = ()  # of the run


class Engine:
    def __init__(self, sock: socket.socket, script: Script, device: str, memory: int) -> None:
        self.socket = sock
        self.script = script
        self.device = device
        self.memory = memory
        self.decoder = FrameDecoder(MAX_FRAME)
        self.sessions: dict[str, Session] = {}
        self.tenants: dict[int, messages.TenantLimits] = {}
        self.models: dict[str, ModelInfo] = {}
        self.loads: dict[int, messages.Load] = {}
        self.page_loads: dict[int, messages.Load] = {}  # loads that have asked for their host tier
        self.pages: dict[str, mmap.mmap] = {}  # by model
        self.late: dict[float, messages.Load] = {}  # loads, by the time when they begin
        self.steps = 0
        self.is_stopping = False
        self.gate = os.open(script.gate, os.O_RDONLY | os.O_NONBLOCK) if script.gate else -1
        self.alive_at = 0.0
        self.trace: messages.Trace | None = None
        self.traced: list[Span] = []
        self.trace_until = 0.0

    # --- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self.send(messages.Ready(self.device, "a script", self.memory or BUDGET, os.getpid()))
        while not self.is_stopping:
            busy = self.is_busy
            watched = [self.socket] + ([self.gate] if busy and self.gate >= 0 else [])
            timeout = 0.0 if busy and self.gate < 0 else self.script.alive_s
            readable, _, _ = select.select(watched, [], [], timeout)
            if self.socket in readable:
                self.receive()
                busy = self.is_busy  # otherwise a step for which a test has written a byte would be lost
            if busy and (self.gate < 0 or (self.gate in readable and os.read(self.gate, 1))):
                self.step()
            self.end_trace()
            self.begin_late_loads()
            if time.monotonic() >= self.alive_at:
                self.alive_at = time.monotonic() + self.script.alive_s
                self.send(messages.Alive())

    @property
    def is_busy(self) -> bool:
        return any(s.run and not s.held and not s.paused for s in self.sessions.values())

    def receive(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise SystemExit(0)
        for frame in self.decoder.feed(data):
            message = messages.decode_to_engine(frame.payload)
            getattr(self, f"on_{type(message).__name__.lower()}")(message)

    def send(self, message: messages.FromEngine, fds: tuple[int, ...] = ()) -> None:
        frame = messages.encode(message, len(fds))
        if fds:
            sent = socket.send_fds(self.socket, [frame], list(fds))
            frame = frame[sent:]
        self.socket.sendall(frame)

    def step(self) -> None:
        self.steps += 1
        if self.trace is not None:
            self.traced.append(Span("step", "step", 1e3 * len(self.traced), 1e3))
        tokens, started, ended_runs = [], [], []
        for name, session in list(self.sessions.items()):
            run = session.run
            if run is None or session.held or session.paused:
                continue
            if not session.is_started:
                session.is_started = True
                started.append(messages.Started(run.request, time.monotonic()))
                prompt = session.tokens[session.first : session.prompt_end]
                if self.trouble(self.script.on_token.get(str(prompt[0]) if prompt else ""), session):
                    continue
                self.send_scores(session)
            if run.logits:
                self.answer_logits(session)
                continue
            stop = next_stop(session.stops, len(session.tokens))
            if stop is not None:
                session.computed, session.stage = stop.position, stop.block
                ended_runs.append((name, "breakpoint"))
                continue
            session.computed = len(session.tokens)
            if not run.max_tokens:
                ended_runs.append((name, "length"))
                continue
            at = len(session.tokens) + shift(session, len(session.tokens) - 1)
            token = self.script.story[at % len(self.script.story)]
            session.tokens.append(token)
            logprobs = None
            if run.logprobs is not None:
                logprobs = Logprobs(-0.5, {t: -float(t) for t in range(run.logprobs)})
            tokens.append(messages.Token(run.request, token, logprobs))
            generated = len(session.tokens) - session.prompt_end
            if token in run.stop_tokens:
                ended_runs.append((name, "stop"))
            elif generated == run.max_tokens or len(session.tokens) == self.script.context:
                ended_runs.append((name, "length"))
        if started:
            self.send(messages.Stepping(started))
        if tokens:
            self.send(messages.Stepped(tokens))
        for name, reason in ended_runs:
            self.finish(self.sessions[name], reason)

    def send_scores(self, session: Session) -> None:
        """Sends the scores in two parts. A token's log probability is minus the token, and each likely token's is 0."""
        run = session.run
        assert run is not None
        if run.prompt_logprobs is None:
            return
        scored, top = session.tokens[max(session.first, 1) : session.prompt_end], run.prompt_logprobs
        for part in (scored[:2], scored[2:]):
            values = b"".join(struct.pack(f"<{1 + top}f", -token, *[0.0] * top) for token in part)
            ids = struct.pack(f"<{top}i", *range(top)) * len(part)
            self.send(messages.PromptScored(run.request, len(part), values, ids))

    def trouble(self, what: str | None, session: Session) -> bool:
        run = session.run
        assert run is not None
        match what:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "garbage":
                self.socket.sendall(b"this is no frame at all")
            case "fail":
                del session.tokens[session.first :]
                session.run = None
                self.send(messages.Failed(run.request, "out_of_memory", "the step ran out of memory", {"bytes": 7}))
                return True
            case None:
                pass
            case _:
                raise AssertionError(what)
        return False

    def finish(self, session: Session, reason: str) -> None:
        run = session.run
        assert run is not None
        session.run, session.held = None, False
        generated = len(session.tokens) - session.prompt_end
        computed = session.prompt_end - session.first
        finished = messages.Finished(run.request, reason, len(session.tokens), generated, computed)  # type: ignore[arg-type]
        if reason == "breakpoint":
            finished.stopped, session.seen_from = session.stage, session.computed
            self.send_captured(finished, session, [Point("resid", session.stage)], finished.length - session.computed)
        elif run.capture:
            positions = finished.length - session.seen_from - (generated > 0)
            self.send_captured(finished, session, run.capture, positions, max(run.max_tokens - 1, 0))
        else:
            self.send(finished)

    def send_captured(
        self, finished: messages.Finished, session: Session, seen: list[Point], positions: int, more: int = 0
    ) -> None:
        """Sends float32 captures, with room for all positions that the run could have had; also after a
        cancellation."""
        points = self.models[session.model].points
        assert points is not None and len(set(seen)) == len(seen)
        first = session.seen_from
        room = max(positions, session.prompt_end - first + more)
        widths = [points.width_at(point) for point in seen]
        offsets = [4 * room * sum(widths[:index]) for index in range(len(widths))]
        seen_at = [first + row + shift(session, first + row) for row in range(positions)] + [0] * (room - positions)
        data = b"".join(constant_rows(seen_at, width) for width in widths)
        finished.capture = messages.CaptureLayout("float32", first, positions, room, len(data), offsets)
        self.send_window(finished, data)

    def answer_logits(self, session: Session) -> None:
        """Logits [tokens, vocab]: all entries of a row are the row's token."""
        run = session.run
        assert run is not None
        vocab = self.models[session.model].vocab
        asked = session.tokens[session.first :]
        session.run = None
        self.send_window(messages.LogitsReady(run.request, len(asked), vocab), constant_rows(asked, vocab))

    def send_window(self, message: messages.FromEngine, data: bytes) -> None:
        fd = new_window("djinnd-scripted", len(data))
        os.pwrite(fd, data, 0)
        self.send(message, (fd,))
        os.close(fd)

    def on_exportkv(self, export: messages.ExportKv) -> None:
        self.send(messages.Failed(export.request, "invalid_request", "a script has no KV", {}))

    # --- messages ---------------------------------------------------------------------------------------------------

    def on_load(self, load: messages.Load) -> None:
        assert load.model not in self.models
        match self.script.on_load.get(load.model):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                self.send(messages.Failed(load.request, "model_rejected", f"{load.model} lacks a tensor", {}))
                return
            case "full":
                self.refuse(load.request, "there is no room on the device", 1)
                return
            case "big":
                self.loads[load.request] = load
                self.send(messages.NeedArena(load.request, load.model, 1 << 60, "f" * 64))
                return
            case "late":
                self.late[time.monotonic() + LATE_S] = load
                return
        self.begin_load(load)

    def begin_late_loads(self) -> None:
        for at in [at for at in self.late if at <= time.monotonic()]:
            self.begin_load(self.late.pop(at))

    def begin_load(self, load: messages.Load) -> None:
        self.loads[load.request] = load
        self.send(messages.Loading(load.model, "reading", 10, 100))
        self.send(messages.NeedArena(load.request, load.model, 1 << 16, fingerprint(load.path)))

    def on_arenarefused(self, refused: messages.ArenaRefused) -> None:
        if refused.request in self.page_loads:
            self.note(self.page_loads.pop(refused.request).model, refused.message)
            return
        del self.loads[refused.request]
        self.send(messages.Failed(refused.request, refused.code, refused.message, refused.data))

    def on_arenaready(self, ready: messages.ArenaReady) -> None:
        if ready.request in self.page_loads:
            self.bring_pages(self.page_loads.pop(ready.request), ready)
            return
        load = self.loads.pop(ready.request)
        memory = posix_ipc.SharedMemory(ready.name)
        with mmap.mmap(memory.fd, ready.offset + (1 << 16)) as arena:
            memory.close_fd()
            block = slice(ready.offset, ready.offset + (1 << 16))
            if ready.complete:
                assert arena[block] == b"W" * (1 << 16)
            arena[block] = b"W" * (1 << 16)
        if not ready.complete:
            self.send(messages.ArenaFilled(load.model))
        config = json.loads((Path(load.path) / "config.json").read_text())
        self.models[load.model] = info = ModelInfo(
            name=load.model,
            path=load.path,
            family=config["model_type"],
            state="ready",
            vocab=config["vocab_size"],
            max_context=self.script.context,
            weight_bytes=1 << 16,
            kv_bytes=load.kv_bytes or 1 << 20,
            page_size=PAGE_SIZE,
            page_bytes=PAGE_BYTES,
            dtype="float32" if load.dtype == "auto" else load.dtype,
            points=PointMap(
                blocks=BLOCKS,
                width=WIDTH,
                vocab=config["vocab_size"],
                layers="model.layers",
                attention="self_attn",
                mlp="mlp",
                norm="model.norm",
                head="lm_head",
            ),
            **places(resident_blocks(load.placing)),
        )
        self.send(messages.Loading(load.model, "adopted" if ready.complete else "filled", 100, 100))
        self.send(messages.Loaded(load.request, info))
        if not self.script.keep_host:
            self.send(messages.HostReleased(load.model))
        self.want_pages(load)

    def want_pages(self, load: messages.Load) -> None:
        nbytes = self.script.pages if load.host_kv_bytes is None else load.host_kv_bytes
        if nbytes:
            self.page_loads[load.request] = load
            self.send(messages.NeedArena(load.request, load.model, nbytes, fingerprint(load.path), holds="pages"))

    def bring_pages(self, load: messages.Load, ready: messages.ArenaReady) -> None:
        """Adds a note with the first bytes of the pages, which say how the engine that wrote them ended."""
        assert ready.complete
        memory = posix_ipc.SharedMemory(ready.name)
        pages = mmap.mmap(memory.fd, memory.size)
        memory.close_fd()
        told = pages[ready.offset : ready.offset + 8].rstrip(b"\0").decode() or "new"
        self.note(load.model, f"pages: {told}, {len(pages) - ready.offset} bytes, disk: {load.disk_folder}")
        pages[ready.offset : ready.offset + 8] = b"used\0\0\0\0"
        self.pages[load.model] = pages

    def note(self, model: str, told: str) -> None:
        if model in self.models:
            self.models[model] = msgspec.structs.replace(self.models[model], notes=[told])

    def on_plan(self, plan: messages.Plan) -> None:
        budget = plan.memory_bytes or self.memory or BUDGET
        if budget < RING_BYTES:
            self.refuse(plan.request, f"a budget of {budget} bytes; the ring alone takes {RING_BYTES}", RING_BYTES)
            return
        where = places(min(resident_blocks(plan.placing), (budget - RING_BYTES) // BLOCK_BYTES))
        planned = ModelPlan(
            model=plan.model,
            family=json.loads((Path(plan.path) / "config.json").read_text())["model_type"],
            dtype=plan.dtype,
            budget_bytes=budget,
            blocks=BLOCKS,
            blocks_plain=where["blocks_plain"],
            blocks_packed=0,
            blocks_streamed=where["blocks_streamed"],
            plain_block_bytes=BLOCK_BYTES,
            packed_block_bytes=0,
            weight_bytes=WEIGHT_BYTES,
            resident_bytes=where["blocks_plain"] * BLOCK_BYTES,
            streamed_bytes=where["streamed_bytes"],
            ring_bytes=plan.placing.ring_bytes or where["ring_bytes"],
            scratch_bytes=0,
            rest_bytes=0,
            kv_bytes=plan.kv_bytes,
            workspace_bytes=0,
            reserved_bytes=0,
            host_bytes=WEIGHT_BYTES,
            slots=plan.placing.slots or 3,
            bus_bytes_per_s=55e9,
            memory_bytes_per_s=4e12,
            flops_per_s=7e14,
            first_token_s=0.1,
            step_s={1: 0.01, 16: 0.02},
            notes=["the script packs nothing"] if plan.placing.packing else [],
        )
        self.send(messages.Planned(plan.request, planned))

    def on_setbudget(self, message: messages.SetBudget) -> None:
        """Every model gets a ring and as many resident blocks as fit."""
        if message.memory_bytes < RING_BYTES:
            self.refuse(message.request, f"the budget could go down to {RING_BYTES} bytes", RING_BYTES)
            return
        self.memory = message.memory_bytes
        fit = min(BLOCKS, (self.memory - RING_BYTES) // BLOCK_BYTES)
        self.models = {name: msgspec.structs.replace(info, **places(fit)) for name, info in self.models.items()}
        models = list(self.models.values())
        self.send(messages.BudgetSet(message.request, self.memory, RING_BYTES + fit * BLOCK_BYTES, 0.25, models))

    def on_trace(self, message: messages.Trace) -> None:
        """Like a real engine, has one trace at a time, with one span a step, without times. Ends by steps or by
        time."""
        if self.trace is not None:
            self.send(messages.Failed(message.request, "retry", "another trace is being recorded", {}))
            return
        self.trace, self.traced, self.trace_until = message, [], time.monotonic() + message.seconds

    def end_trace(self) -> None:
        if self.trace is not None and (len(self.traced) == self.trace.steps or time.monotonic() >= self.trace_until):
            self.send(messages.Traced(self.trace.request, self.traced))
            self.trace = None

    def refuse(self, request: int, why: str, needed: int) -> None:
        self.send(messages.Failed(request, "out_of_memory", why, {"needed": needed}))

    def on_unload(self, unload: messages.Unload) -> None:
        own = {name: session for name, session in self.sessions.items() if session.model == unload.model}
        assert not any(session.run for session in own.values()) and (unload.keep_pages or not own)
        for name in own:
            del self.sessions[name]
        pages = self.pages.pop(unload.model, None)
        if pages is not None and unload.keep_pages:
            keep(pages)
        del self.models[unload.model]
        self.send(messages.Unloaded(unload.request))

    def on_open(self, message: messages.Open) -> None:
        assert message.session not in self.sessions and message.model in self.models
        self.sessions[message.session] = Session(
            message.model,
            message.tenant,
            message.tokens,
            paused="host" * message.paused,
            edits=message.edits,
            due_from=message.due_from,
        )

    def on_fork(self, message: messages.Fork) -> None:
        parent = self.sessions[message.parent]
        assert message.session not in self.sessions and parent.run is None
        self.sessions[message.session] = Session(
            parent.model, parent.tenant, list(parent.tokens), edits=parent.edits, due_from=parent.due_from
        )
        self.sessions[message.session].computed = parent.computed

    def on_addedit(self, message: messages.AddEdit) -> None:
        session = self.sessions[message.session]
        assert session.run is None and message.edit.number > max((edit.number for edit in session.edits), default=0)
        session.edits = (*session.edits, message.edit)
        session.due_from = min(session.due_from, message.edit.first)
        session.computed = min(session.computed, message.edit.first)

    def on_endedits(self, message: messages.EndEdits) -> None:
        session = self.sessions[message.session]
        assert session.run is None and message.edits
        assert all(not edit.over for edit in session.edits if edit.number in message.edits)
        session.edits = ended(session.edits, message.edits, message.at)
        session.due_from = min(session.due_from, message.at)
        session.computed = min(session.computed, message.at)

    def on_close(self, message: messages.Close) -> None:
        session = self.sessions[message.session]
        if session.run is not None:
            self.finish(session, "cancelled")
        del self.sessions[message.session]

    def on_run(self, run: messages.Run) -> None:
        session = self.sessions[run.session]
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
        for session in self.running(message.request):
            self.finish(session, "cancelled")

    def on_halt(self, message: messages.Halt) -> None:
        for session in self.running(message.request):
            del session.tokens[session.prompt_end + message.keep :]
            self.finish(session, "stop")

    def on_hold(self, message: messages.Hold) -> None:
        for session in self.running(message.request):
            session.held = message.held

    def running(self, request: int) -> list[Session]:
        """The session of this request, or none if the request has ended."""
        return [session for session in self.sessions.values() if session.run and session.run.request == request]

    def on_truncate(self, message: messages.Truncate) -> None:
        session = self.sessions[message.session]
        assert session.run is None and message.length <= len(session.tokens)
        del session.tokens[message.length :]
        session.computed = min(session.computed, message.length)
        session.edits = cut(session.edits, message.length)

    def on_signal(self, message: messages.Signal) -> None:
        assert message.expected_s >= 0 and (message.waits or not message.expected_s)
        session = self.sessions[message.session]
        session.waits, session.wait_of = message.waits, f"{message.tool} {message.expected_s:g}"

    def on_setclass(self, message: messages.SetClass) -> None:
        self.sessions[message.session].priority = message.priority

    def on_explain(self, message: messages.Explain) -> None:
        """Sessions are served in the order of opening. The figures are those of signals and calls."""
        session, run = self.sessions[message.session], self.sessions[message.session].run
        figures: dict[str, int | float | str] = {
            "wait_of": session.wait_of,
            "priority": session.priority,
            "expected_tokens": run.expected_tokens if run else 0,
            "between_tokens": "class" if run is None or run.between_tokens is None else run.between_tokens,
            "first_token": "class" if run is None or run.first_token is None else run.first_token,
            "deadline_in_s": run.deadline - time.monotonic() if run and run.deadline else 0.0,
        }
        state = "waiting" if session.waits else "running" if run else "idle"
        ahead = list(self.sessions)[: list(self.sessions).index(message.session)]
        self.send(messages.Explained(message.request, state, "the script says so", figures, ahead))

    def on_pause(self, message: messages.Pause) -> None:
        """Fails for the disk tier, which has no room."""
        session = self.sessions[message.session]
        if message.tier == "disk":
            self.refuse(message.request, "the disk is full", 1)
            return
        session.paused = message.tier
        self.send(messages.Paused(message.request, pages_of(session), pages_of(session) * PAGE_BYTES, 0.125))

    def on_resume(self, message: messages.Resume) -> None:
        self.sessions[message.session].paused = ""

    def on_publicprefix(self, message: messages.PublicPrefix) -> None:
        """Adds a note to the model, in the order in which sessions and prefixes came."""
        assert message.model in self.models
        told = f"public: {len(message.tokens)} tokens before session {len(self.sessions)}"
        info = self.models[message.model]
        self.models[message.model] = msgspec.structs.replace(info, notes=[*info.notes, told])

    def on_inquire(self, message: messages.Inquire) -> None:
        uses = [use_of(name, session) for name, session in self.sessions.items()]
        findings = ["the script was told to find something"] if self.script.on_load.get("check") else []
        report = messages.Report(
            message.request,
            budget_bytes=self.memory or BUDGET,
            used_bytes=1 << 16,
            steps=self.steps,
            generated_tokens=0,
            models=list(self.models.values()),
            sessions=uses,
            tenants=[self.use_of_tenant(tenant) for tenant in {s.tenant for s in self.sessions.values()}],
            findings=findings,
            copied={"weights": 0, "pages up": 0, "pages down": 0},
        )
        self.send(report)

    def use_of_tenant(self, tenant: int) -> messages.TenantUse:
        """Its device bytes are its pages, and its disk bytes are its disk limit, so that a test sees the limits."""
        pages = sum(pages_of(session) for session in self.sessions.values() if session.tenant == tenant)
        limits = self.tenants.get(tenant, messages.TenantLimits(tenant))
        return messages.TenantUse(tenant, pages * PAGE_BYTES, 0, limits.disk_kv or 0)

    def on_settenants(self, message: messages.SetTenants) -> None:
        self.tenants.update((limits.tenant, limits) for limits in message.tenants)

    def on_setpolicy(self, message: messages.SetPolicy) -> None:
        """Ignored, because the script decides the schedule."""

    def on_shutdown(self, message: messages.Shutdown) -> None:
        while self.script.on_shutdown == "hang":
            time.sleep(1)
        for pages in self.pages.values() if message.keep_pages else ():
            keep(pages)
        if self.script.on_shutdown == "linger":
            self.socket.shutdown(socket.SHUT_WR)
            time.sleep(3600)
        self.is_stopping = True


def keep(pages: mmap.mmap) -> None:
    pages[HEADER_BYTES : HEADER_BYTES + 8] = b"kept\0\0\0\0"


def resident_blocks(placing: Placing) -> int:
    if placing.resident is None:
        return BLOCKS
    return int(placing.resident * BLOCKS) if isinstance(placing.resident, float) else placing.resident


def places(resident: int) -> dict[str, int]:
    """Fields of a ModelInfo."""
    streamed = BLOCKS - resident
    return {
        "blocks": BLOCKS,
        "blocks_plain": resident,
        "blocks_streamed": streamed,
        "streamed_bytes": streamed * BLOCK_BYTES,
        "ring_bytes": RING_BYTES if streamed else 0,
    }


def constant_rows(values: list[int], width: int) -> bytes:
    """float32 [values, width]: all entries of a row are its value."""
    return b"".join(struct.pack("<f", value) * width for value in values)


def shift(session: Session, position: int) -> int:
    extents = ((edit.number, extent) for edit in session.edits for extent in edit.extents)
    return sum(number for number, extent in extents if extent.start <= position < extent.end)


def pages_of(session: Session) -> int:
    return -(-len(session.tokens) // PAGE_SIZE)


def use_of(name: str, session: Session) -> messages.SessionUse:
    """A paused or waiting session has all its pages on the host."""
    state = "paused" if session.paused else "running" if session.run else "waiting" if session.waits else "idle"
    pages = pages_of(session)
    if session.paused or session.waits:
        return messages.SessionUse(name, state, 0, 0, host_pages=pages)
    return messages.SessionUse(name, state, len(session.tokens), pages)


def fingerprint(path: str) -> str:
    return (path.encode().hex() * 64)[:64]


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)  # its pid; its death closes the stream too
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=int, default=0)
    arguments = parser.parse_args(command_line)
    script = msgspec.json.decode(arguments.script.read_bytes(), type=Script)
    if script.marks:
        with open(script.marks, "ab") as marks:
            marks.write(b".")
            start = marks.tell()
        match script.on_start.get(str(start), script.on_start.get("every")):
            case "die":
                sys.exit(1)
            case "refuse":
                sys.exit(3)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
    with (
        socket.socket(fileno=arguments.fd) as sock,
        suppress(ConnectionError),
    ):  # the server is gone
        Engine(sock, script, arguments.device, arguments.memory).serve()


if __name__ == "__main__":
    main()
