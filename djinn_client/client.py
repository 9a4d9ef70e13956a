"""The blocking client's session."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from djinn_client import breaking, interventions, whitebox
from djinn_client.breaking import Breakpoint
from djinn_client.breakpoints import BreakpointInfo, When
from djinn_client.cache import Cache
from djinn_client.checkpoints import Checkpoint
from djinn_client.connection import OnProgress
from djinn_client.edits import EditInfo, Op
from djinn_client.errors import DjinnError
from djinn_client.hand_over import Import, import_of_file, import_of_kv, save
from djinn_client.hits import Hit
from djinn_client.interventions import Function, Intervention
from djinn_client.kv import KV, exported_kv
from djinn_client.loading_line import loading_line
from djinn_client.messages import Message
from djinn_client.options import ChatOptions, GenerateOptions
from djinn_client.protocol import Class, Generated, PauseReply, SessionInfo, SignalKind, Tier
from djinn_client.scheduling import Why
from djinn_client.session import SessionSteps
from djinn_client.steps import run
from djinn_client.stream import Stream
from djinn_client.whitebox import Capture, Edit

if TYPE_CHECKING:
    from typing import Self, Unpack

    import numpy as np
    import numpy.typing as npt


class Session:
    """A session of one model. The daemon keeps its tokens and KV between calls.

        with djinn.Session("djinn-tiny") as s:
            print(s.generate("def fibonacci(", max_tokens=32).text)

    `model` is loaded first if it is not loaded. `on_progress` is called with how far that has come; without it, a
    terminal shows a progress line when loading takes longer than a second. `address` is the path of the daemon's
    socket; None: $DJINND_ADDRESS, then the system's, then the user's. `priority` None is the highest class that the
    caller may have. `token` is one of the daemon's tokens (docs/tokens.md); None: $DJINND_TOKEN. The `with` block
    closes the session.

    Ctrl-C in any call stops the work in the daemon within one step, and the session stays usable. Threads may share a
    session, but not call it at once: the second call raises SessionBusy. A process that is forked from this one calls
    it over a connection of its own, and does not close it: only the process that has opened it does.
    """

    def __init__(
        self,
        model: str,
        *,
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Raises ConnectionLost, ModelNotFound, ModelRejected, OutOfMemory, InvalidRequest."""
        self._steps = SessionSteps(address, token)
        with loading_line(on_progress) as told:
            run(self._steps.open(model, priority, told))

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
        """The session as it was when it was opened or attached; `djinn.sessions()` has it as it is now."""
        return self._steps.info

    @property
    def token_ids(self) -> list[int]:
        """All tokens that the session has now, of prompts and outputs."""
        return run(self._steps.token_ids())

    def generate(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Generated:
        """Extends the session by the prompt and generates. The prompt is a text or token ids; None goes on from where
        the session is. A model that was trained for chats wants `chat`.

        The options are those of `GenerateOptions`.

        Raises InvalidRequest, PromptTooLong, TokenOutOfRange, OutOfMemory, Retry.
        """
        return run(self._steps.generate(prompt, options))

    def stream(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Does what `generate` does and gives the output piece by piece. The call begins with the first piece."""
        return Stream(self._steps.stream(prompt, options))

    def chat(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Generated:
        """The model's answer in a chat: `.text` is its content, `.message` also has reasoning and tool calls.

            s.chat("Name a river.")
            s.chat("And where does it end?")

        A text is the user's next message, after `messages`; a list of messages, in OpenAI's form, is the whole chat.
        The model's template makes a prompt of it. The session keeps the tokens that it has in common with the prompt
        and computes the others: in a chat that goes on the new messages, in an edited one all that follows the edit.

        The options are those of `ChatOptions`. Raises what `generate` raises, and InvalidRequest for a model without a
        template or with the sentence of a template that refuses. After an error `messages` is as before."""
        return run(self._steps.chat(said, options))

    def chat_stream(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Stream:
        """Does what `chat` does and gives the answer piece by piece: `piece.text` is content, `piece.delta` has
        reasoning and tool calls. `messages` has the answer when the stream was read to its end."""
        return Stream(self._steps.chat_stream(said, options))

    @property
    def messages(self) -> list[Message]:
        """The chat so far, answers included. This object has it, not the daemon: change it or set it to go on from
        elsewhere. After attach() it is empty. `s.chat(s.messages[:-1])` answers the last message anew."""
        return self._steps.messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._steps.messages = list(messages)

    def forward(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """Extends the session by these n tokens and returns their logits, float32 [n, vocab], mapped and not copied."""
        return run(self._steps.forward(token_ids))

    def truncate(self, length: int) -> None:
        """Keeps only the first `length` tokens. Raises InvalidRequest if there are fewer."""
        run(self._steps.truncate(length))

    def keep_record(self, body: bytes = b"", *, name: str = "") -> str:
        """Keeps the point at which the session is, with the caller's own bytes, and returns the record's name. See
        Client.keep_record."""
        return run(self._steps.keep_record(body, name))

    def fork(self, priority: Class | None = None) -> Self:
        """A second session with the tokens and KV of this one, which goes its own way from here. Common pages are held
        once.

        The fork has a connection of its own, may be called while this session runs a call, and has to be closed, too.
        `priority` None: as this one. Raises SessionBusy while a call runs, NotPermitted or QuotaExceeded at a
        limit of sessions."""
        return self._over(run(self._steps.fork(priority)))

    def steer(
        self,
        point: str | Iterable[str],
        vector: Any = None,
        *,
        op: Op = "add",
        scale: float = 1.0,
        low: float | None = None,
        high: float | None = None,
        positions: Iterable[int] | None = None,
    ) -> Edit[None]:
        """Changes the session's activations `a` at a point, or at several, until the edit is removed:

            add             a + scale·v                          v: `vector`
            scale           a·scale                              takes no vector
            project_out     a - scale·(a·v̂)v̂                     v̂: v of length 1
            replace         v
            clamp           a·v̂ is brought between `low` and `high`, either of which may be None

        From now on: where the next token is chosen, and at all that follow; or at `positions`, ascending, also such as
        have been computed already: these are computed again, with all that comes after them, when the session next
        runs. `vector` is [width], or a row for each of the positions: a torch tensor on any device, a numpy array or a
        sequence of numbers, in any dtype (the arithmetic is in float32, and rounded once). `point`: see djinn.points;
        "blocks.14" is what block 14 gives, and "blocks.*" stands for all blocks.

        An edit is data and belongs to the session: forks have it, and it survives restarts. Several at one point apply
        in the order in which they were made.

        Raises InvalidRequest for a point that the model has not, a vector of another width, one with NaN or infinities
        (which may only replace something: see docs/whitebox.md), or one that is larger than a call can carry (15 MiB);
        SessionBusy, QuotaExceeded, Retry."""
        steps = whitebox.steer(self._steps, point, vector, op, scale, low, high, positions)
        return Edit(self._steps, run(steps), run)

    def patch(self, activation: Any, point: str | None = None, *, positions: Iterable[int] | None = None) -> Edit[None]:
        """Replaces activations by others: steer with op="replace".

        An activation from a Cache knows its point and its positions: `t.patch(cache["blocks.9"], positions=[5])` takes
        position 5 of it, and puts it at position 5 of this session; without `positions`, all that there are. Any other
        tensor or array, [positions, width], needs the point and the positions: also a slice of an activation, to put it
        elsewhere: `t.patch(cache["blocks.9"][:, 5:6], "blocks.9", positions=[7])`.

        Raises what `steer` raises."""
        return Edit(self._steps, run(whitebox.patch(self._steps, activation, point, positions)), run)

    def unsteer(self, edit: Edit[None] | int | None = None) -> None:
        """From now on this edit (or the one with this id; None: all) changes nothing. What it has changed stays, as it
        is in the KV of the session's tokens; `truncate` to before it does away with that. Raises SessionBusy."""
        run(whitebox.unsteer(self._steps, edit))

    def edits(self) -> list[EditInfo]:
        """The edits that the session's KV, or what comes next, follows from: those that were removed, too, where they
        have changed something."""
        return run(whitebox.edits(self._steps))

    def capture(self, points: str | Iterable[str]) -> Capture[Cache]:
        """`s.capture(["blocks.*.hook_resid_post", "logits"]).run("text")` runs the text and returns the activations at
        these points as a Cache of tensors, mapped from memory that the daemon filled by one copy. See Capture.run.

        There are no gradients: the model has run in another process, without a graph of the computation. The tensors
        have `requires_grad` False, and `.backward()` of what is computed from them reaches no weight and no other
        activation. For gradients, load the model with transformers; `share_model` serves that same one."""
        return Capture(self._steps, points, run)

    def breakpoint(
        self,
        point: str | None = None,
        *,
        layer: int | None = None,
        when: When = "always",
        every: int = 1,
        positions: Iterable[int] | None = None,
    ) -> Breakpoint[None]:
        """Calls of the session stop where one of its positions comes to this point, which lies between two blocks;
        `layer=20` is "blocks.20.hook_resid_post", what block 20 gives. Other sessions run on.

        `when`: at the prompt's positions ("prefill"), at generated ones ("decode", of which at each `every`th), or at
        both; with `positions`, ascending, only at those of them. A breakpoint belongs to the session until it is
        removed, and its forks have it.

        Raises InvalidRequest for a point within a block, or that the model has not; SessionBusy, QuotaExceeded,
        Retry."""
        return Breakpoint(self._steps, run(breaking.add(self._steps, point, layer, when, every, positions)), run)

    def breakpoints(self) -> list[BreakpointInfo]:
        return run(breaking.breakpoints(self._steps))

    def intervene(
        self, point: str, function: Function, *, local: bool = False, when: When = "always"
    ) -> Intervention[None]:
        """`function(activation, context)` is called with what comes to this point, between two blocks, in each call of
        the session until the intervention is removed: [1, positions, width], as `Hit.activation` is. What it writes to
        it, or returns in its place, is what the call goes on with, by itself: `run`, `generate` and `resume` give what
        they would without stopping. See InterventionContext for what it is told beside.

        `local=True`: it runs in this process, in the thread that waits for the call, on which nothing else can be
        asked meanwhile (SessionBusy). What it raises, its call raises, and leaves the session where it has stopped.

        Without: it is pickled (cloudpickle) and runs in the daemon, in a process of this user's own that has no files,
        no network, and limits of time and memory; NotPermitted unless the daemon's configuration names the user. What
        it raises, or is ended for, its call raises as FunctionFailed. A point has functions of one kind only. See
        docs/whitebox.md.

        Several at one point are called in the order in which they were made. `when`: see `breakpoint`; "prefill" costs
        nothing at generated tokens. `stream`, `forward` and `capture` cannot stop for one, and are refused.

        Raises what `breakpoint` raises, and InvalidRequest for what cannot be pickled or takes more than a call can
        carry (15 MiB); its calls, InvalidRequest for a replacement of another shape or dtype."""
        return Intervention(self._steps, run(interventions.add(self._steps, point, function, local, when)), run)

    def run(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Hit | Generated:
        """`generate` that stops at breakpoints: a Hit, or a Generated where nothing has stopped it.

            s.breakpoint(layer=20)
            hit = s.run("The Eiffel Tower is in")
            hit.activation[:, -1] *= 0.9
            out = s.resume(max_tokens=20)

        (`generate` and `stream` stop there, too, with `finish_reason` "breakpoint".) Raises what `generate` raises."""
        return run(breaking.run_on(self._steps, prompt, options))

    def kv(self) -> KV:
        """The KV of all its tokens in this process's memory: see KV. What of it the daemon does not have is computed;
        it comes by one copy over the bus, into memory that is mapped here. Raises OutOfMemory, Retry."""
        answer = run(self._steps.export(kv=True))
        return exported_kv(answer.message, answer.fds)

    def save(self, path: str | os.PathLike[str], *, kv: bool | None = None) -> None:
        """Writes the session to a file, which only its owner may read, for `load`; replaces one that is there.

        `kv` None: with its KV only where that does not follow from its tokens (`info.foreign_kv`, or edits). Otherwise
        the file has tokens, a few kilobytes, and who loads it computes their KV. Raises OSError, and what `kv()`
        raises."""
        save(path, self._steps.info, run(self._steps.export(kv)))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kv: bool | None = None,
        model: str | None = None,
        priority: Class | None = None,
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """A new session with what a file of `save` has. `model` and `priority` None: as when it was saved; a model of
        another name must have the same weights. `kv` False: without the file's KV, which is computed from the tokens.

        A session with KV from a file ends with the engine that has it, as one of `from_kv`.

        Raises FileDamaged, ModelMismatch, InvalidRequest for KV of another form than the daemon's, OSError, and what
        `Session` raises."""
        return cls._imported(import_of_file(path, model, priority, kv), address, on_progress)

    @classmethod
    def _imported(cls, handed: Import, address: str | None, on_progress: OnProgress | None) -> Self:
        steps = SessionSteps(address)
        with loading_line(on_progress) as told:
            run(steps.import_(handed.request, handed.fds, told))
        return cls._over(steps)

    def signal(self, kind: SignalKind, *, expected_s: float | None = None, tool: str = "") -> None:
        """Tells the daemon what comes next, and waits for no answer; between two pieces of a stream, too.

        "IO_WAIT": nothing, for `expected_s` seconds (at most a day; None or 0: not known), so the session's pages may
        leave the device, and are back in time where the time is known. Where it is not, the daemon goes by how long
        this user's sessions have waited for the `tool` of that name (at most 64 characters) before.
        "COMPUTE": a call, in a moment.
        "PREFILL", "DECODE": likewise; and from now on what counts for this session is how much is done in all, or, as
        for every session at first, the time between its tokens.

        Raises InvalidRequest; SessionBusy while a call runs.
        """
        run(self._steps.signal(kind, expected_s, tool))

    @contextmanager
    def io_wait(self, expected_s: float | None = None, *, tool: str = "") -> Iterator[None]:
        """`with s.io_wait(tool="search"): search()`: IO_WAIT before it and COMPUTE after it, also where it raises."""
        self.signal("IO_WAIT", expected_s=expected_s, tool=tool)
        try:
            yield
        except BaseException:
            with suppress(DjinnError):  # what happened first is what the caller must see
                self.signal("COMPUTE")
            raise
        if not self._steps.ended:
            self.signal("COMPUTE")

    def pause(self, tier: Tier = "host") -> PauseReply:
        """Stops the session, in the middle of a call too, and moves its pages off the device: to "host" or "disk".
        Returns when they are there, with how many they are.

        The call's stream stays open, and goes on at resume() with the token that would have come; a call that is made
        meanwhile waits for that. May be called while a call runs. A restart of the daemon ends the pause.

        Raises InvalidRequest, OutOfMemory where the tier has no room, Retry.
        """
        return run(self._steps.pause(tier))

    def resume(
        self, replacement: Any = None, *, from_: Checkpoint | None = None, **options: Unpack[GenerateOptions]
    ) -> Hit | Generated | None:
        """Lets the session go on from where it has stopped.

        **At a hit**: from the block behind it, with the activation as it is now in `hit.activation`, or with
        `replacement`, of the same shape and dtype. What has changed replaces what was there: an edit, see `patch`;
        untouched, it is as if nothing had stopped. A Hit at the next breakpoint, or a Generated. The options are those
        of `generate`, and what they count they count from here.

        `from_`: from this hit or checkpoint, also where the session has gone on since, or is a fork of the one that had
        it: it is truncated to its last position first. As often as wanted.

        **Paused**: from where pause() stopped it; None. May be called while a call runs. A session that is neither at a
        hit nor paused stays as it is.

        Where NaN or infinities have been written, and lead to such logits, the Generated ends there: `finish_reason` is
        "not_finite".

        Raises InvalidRequest for a replacement of another shape or dtype, and for a hit that is there no more; nothing
        has changed then. SessionBusy, QuotaExceeded, Retry."""
        return run(breaking.resume(self._steps, replacement, from_, options))

    def set_priority(self, priority: Class) -> None:
        """The session has this class from now on. May be called while a call runs, which goes on in it.

        Raises InvalidRequest, QuotaExceeded for a higher class than the user may have, Retry."""
        run(self._steps.set_priority(priority))

    def why(self) -> Why:
        """Why the session is running, or not: for people, see Why. May be called while a call runs."""
        return run(self._steps.why())

    def close(self) -> None:
        """Closes the session in the daemon; again does nothing. In a process that was forked from the one that opened
        it: detach()."""
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


def attach(session: str, *, address: str | None = None, token: str | None = None) -> Session:
    """The session with this id, left by detach() or by a client that died. Raises SessionNotFound."""
    steps = SessionSteps(address, token)
    run(steps.attach(session))
    return Session._over(steps)


def from_kv(
    model: str,
    tokens: Iterable[int],
    kv: Any,
    *,
    priority: Class | None = None,
    address: str | None = None,
    on_progress: OnProgress | None = None,
) -> Session:
    """A new session with these tokens, and the KV of the first of them from this process: computed here, or edited.

    kv   a KvWindow that was filled, which is uploaded as it lies; a KV, or pages of all tokens as a tensor or an array
         [pages, blocks, 2, page_size, kv_heads, head_dim] in the model's dtype, which are copied into a window first

    Tokens behind those that `kv` is of are computed when the session first runs. Where it is asked to go on without a
    prompt, the last token's KV is computed anew, to choose the next one.

    What is in the KV is not checked, and cannot be computed again: the session shares it with its forks only, is not in
    the journal, and is lost with the engine that has it; the next call then raises SessionLost.

    Raises InvalidRequest where the KV does not fit model or tokens, PromptTooLong, TokenOutOfRange, OutOfMemory, Retry.
    """
    handed = import_of_kv(model, tokens, kv, priority, address, on_progress)
    return Session._imported(handed, address, on_progress)
