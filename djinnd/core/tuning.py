"""The tuned constants of guesses, from texts and from draft models. Each is measured (how, where) or chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuessTuning:
    """How a session's next tokens are guessed from its own tokens, and those of its tenant's others."""

    longest: int = 16  # Chosen: tokens of a guess.
    decay: float = 0.8  # Chosen: how much an earlier forecast counts, for each later one.
    first_right: float = 1.0  # Chosen: forecasts are right half of the time, until some have been judged.
    first_judged: float = 2.0
    sure: float = 0.97  # Chosen: from this rate on, a guess is as long as it may be.
    # Chosen: a guessed token that seems to cost nothing is run if it has this chance.
    least_chance: float = 0.2
    usual: int = 4  # Chosen: tokens of a guess for which the cost of guesses is predicted.
    # Chosen: after this many steps without a guess, guesses that have seemed too dear are tried again. If they are too
    # dear, this costs less than half of a percent.
    again: int = 256
    # Measured on a Xeon core beside other work: looking for a guess in the own text and in 20 others takes 3.1 µs if
    # there is none, and 5 µs if there is one. A step in which this would take more than the share (chosen) runs no
    # guesses: with so many rows, a token of a guess costs about as much as a row.
    lookup_s: float = 4e-6
    lookup_share: float = 0.015
    least_slots: int = 1 << 12  # Chosen: 16 KiB a session; slots are twice the session's tokens, up to the next limit.
    most_slots: int = 1 << 17  # Chosen: 512 KiB a session.
    most_shared_slots: int = 1 << 17  # Chosen: 1 MiB for all sessions of a tenant on a model.
    indexed_at_once: int = 2048  # Measured there: 0.09 ms. So a long prompt is indexed over several steps.


@dataclass(frozen=True, slots=True)
class DraftTuning:
    """How a draft model guesses. All values are chosen."""

    first_rate: float = 0.8  # Share of right tokens that is expected of a draft that has not run yet.
    # How much an earlier guess counts, for each later one. A draft is about as good everywhere in a text, so more of
    # its guesses count than of those from texts. The share of right tokens is then less often low by chance.
    decay: float = 0.9
    # After this many steps of a session without a guess that seemed to pay, `first_rate` is expected of it again, and
    # after as many steps without any guess of all new sessions.
    again: int = 1024
    hopeful: int = 16  # One in so many new sessions expects `first_rate`. The others expect the rate of all of late.
    behind: int = 32  # A session with at most this many tokens that the draft has not run gets a guess at once.
    # At most so many tokens of prompts are run by the draft in a step, and at least so many of a session that is
    # behind. Between the two, as many as take this share of the step.
    most_tokens: int = 1024
    least_tokens: int = 32
    catch_up_share: float = 0.25
    # A guessed token takes at least this share of the time of a token without guesses, in the draft and in the step.
    least_cost: float = 0.05
    measured_again: int = 4096  # After so many steps without a guess, the draft's passes are measured again.
    longest_share: float = 1.0  # While other rows wait, the passes for guesses take at most this share of the step.


@dataclass(frozen=True, slots=True)
class HeadTuning:
    """How the hidden states of a target wait for its head. All values are chosen."""

    places: int = 2048  # Hidden states that can wait, of all sessions; 28 MiB with 7,168 numbers of 16 bits.
    # A session with so many tokens that the head can run has them run right behind the step: a prompt at once, and the
    # tokens of guesses from texts a few dozen at a time.
    at_once: int = 32
    idle_steps: int = 16  # After so many steps without a guess that seemed to pay, no hidden states are kept.


GUESSES = GuessTuning()
DRAFTS = DraftTuning()
HEADS = HeadTuning()
