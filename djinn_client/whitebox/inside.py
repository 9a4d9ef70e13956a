"""The calls of a session that look into the model: capture, steer, breakpoints, interventions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from djinn_client.arguments.options import GenerateOptions
from djinn_client.protocol import Generated
from djinn_client.protocol.fields.breakpoints import BreakpointInfo, When
from djinn_client.protocol.fields.edits import EditInfo, Op
from djinn_client.session.calls import SessionSteps
from djinn_client.tensors.cache import Cache
from djinn_client.tensors.hits import Hit
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.transport.steps import run
from djinn_client.whitebox import breakpoint_calls, interventions, probing
from djinn_client.whitebox.breakpoint_calls import Breakpoint
from djinn_client.whitebox.interventions import Function, Intervention
from djinn_client.whitebox.probing import Capture, Edit

if TYPE_CHECKING:
    from typing import Unpack


class InsideModel:
    """This part of `Session`. See docs/guide/whitebox.md."""

    _steps: SessionSteps

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
        (which may only replace something: see docs/guide/whitebox.md), or one that is larger than a call can carry
        (15 MiB); SessionBusy, QuotaExceeded, Retry."""
        steps = probing.steer(self._steps, point, vector, op, scale, low, high, positions)
        return Edit(self._steps, run(steps), run)

    def patch(self, activation: Any, point: str | None = None, *, positions: Iterable[int] | None = None) -> Edit[None]:
        """Replaces activations by others: steer with op="replace".

        An activation from a Cache knows its point and its positions: `t.patch(cache["blocks.9"], positions=[5])` takes
        position 5 of it, and puts it at position 5 of this session; without `positions`, all that there are. Any other
        tensor or array, [positions, width], needs the point and the positions: also a slice of an activation, to put it
        elsewhere: `t.patch(cache["blocks.9"][:, 5:6], "blocks.9", positions=[7])`.

        Raises what `steer` raises."""
        return Edit(self._steps, run(probing.patch(self._steps, activation, point, positions)), run)

    def unsteer(self, edit: Edit[None] | int | None = None) -> None:
        """Ends this edit, or the one with this id; None: all. Positions that it has changed stay changed, as they are
        in the session's KV, until `truncate` removes them. Raises SessionBusy."""
        run(probing.unsteer(self._steps, edit))

    def edits(self) -> list[EditInfo]:
        """The edits of the session. Removed ones are among them if they have changed positions that are still there."""
        return run(probing.edits(self._steps))

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
        when: When | None = None,
        every: int = 1,
        positions: Iterable[int] | None = None,
    ) -> Breakpoint[None]:
        """Calls of the session stop when one of its positions comes to this point, which lies between two blocks.
        `layer=20` is "blocks.20.hook_resid_post", the output of block 20. Other sessions run on.

        A call stops once, at the end of its prompt ("prefill"). `when="decode"` stops at each generated token instead,
        or at each `every`th, and `when="every"` at both. `positions`, ascending, chooses some of these positions; with
        `positions` or `every` and without `when`, prompt and generated ones count. A breakpoint belongs to the session
        and its forks until it is removed.

        Raises InvalidRequest for a point within a block, or one that the model does not have; SessionBusy,
        QuotaExceeded, Retry."""
        steps = breakpoint_calls.add(self._steps, point, layer, when, every, positions)
        return Breakpoint(self._steps, run(steps), run)

    def breakpoints(self) -> list[BreakpointInfo]:
        return run(breakpoint_calls.breakpoints(self._steps))

    def intervene(
        self, point: str, function: Function, *, local: bool = False, when: When = "every"
    ) -> Intervention[None]:
        """Calls `function(activation, context)` at this point, between two blocks, in each call of the session until
        the intervention is removed. The activation is [1, positions, width], as `Hit.activation` is. The call goes on
        with the values that the function has written to it or returned: `run`, `generate` and `resume` return as if
        they had not stopped. InterventionContext has what else the function is told.

        With `local=True` the function runs in this process, in the thread that waits for the call; meanwhile the
        session takes no other call (SessionBusy). The call raises the function's exception and leaves the session
        there.

        Without it the function is pickled (cloudpickle) and runs in the daemon, in a process of this user without files
        and network and with limits of time and memory; NotPermitted unless the daemon's configuration names the user.
        The call raises FunctionFailed if the function raises or is ended. A point has functions of one kind only.

        Several functions at one point are called in the order in which they were made. `when` is that of `breakpoint`,
        and "every" by default; "prefill" costs nothing at generated tokens. `stream`, `forward` and `capture` cannot
        stop for a function, and are refused (SessionStateError).

        Raises what `breakpoint` raises, and InvalidRequest for a function that cannot be pickled or is more than a call
        can carry (15 MiB). Its calls raise InvalidRequest for a replacement of another shape or dtype."""
        return Intervention(self._steps, run(interventions.add(self._steps, point, function, local, when)), run)

    def run(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> Hit | Generated:
        """Generates and stops at breakpoints. Returns a Hit, or a Generated if no breakpoint has stopped it.

            s.breakpoint(layer=20)
            hit = s.run("The Eiffel Tower is in")
            hit.activation[:, -1] *= 0.9
            out = s.resume(max_tokens=20)

        (`generate` and `stream` stop there, too, with `finish_reason` "breakpoint".) Raises what `generate` raises."""
        return run(breakpoint_calls.run_on(self._steps, prompt, options))

    def resume(self, replacement: Any = None, **options: Unpack[GenerateOptions]) -> Hit | Generated:
        """Goes on from the hit at which the session has stopped: from the next block, with the activation as it is now
        in `hit.activation`, or with `replacement`, of the same shape and dtype. Changed values replace those that were
        there, by an edit (see `patch`); without changes the call goes on as if it had not stopped. Returns a Hit at the
        next breakpoint, or a Generated. The options are those of `generate`, and count from here.

        If written NaN or infinities lead to such logits, the Generated ends there with `finish_reason` "not_finite".

        Raises SessionStateError where the session is at no hit, InvalidRequest for a replacement of another shape or
        dtype, and for a hit that is gone; SessionBusy, QuotaExceeded, Retry. Nothing has changed then."""
        return run(breakpoint_calls.resume(self._steps, replacement, options))

    def resume_from(
        self, start: ResumePoint, replacement: Any = None, **options: Unpack[GenerateOptions]
    ) -> Hit | Generated:
        """Goes on as `resume` does, from this hit or resume point: as often as wanted, also if the session has gone on
        since or is a fork of the session that had it. The session is truncated to the point's last position first.
        Raises what `resume` raises."""
        return run(breakpoint_calls.resume_from(self._steps, start, replacement, options))
