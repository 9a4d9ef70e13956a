"""Runs one contender after another. Each has the machine for itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.harness.bus import measured_apart
from tools.bench.harness.prompts import prompt
from tools.bench.stream import equality, peers, served
from tools.bench.stream.checkpoint import Checkpoint
from tools.bench.stream.equality import Logits
from tools.bench.stream.experiment import CONTENDERS, SERVED, Contender, Experiment
from tools.bench.stream.memory import DeviceMemory, nvml_meter
from tools.bench.stream.outcome import Job, Outcome, Results, Status
from tools.bench.stream.served import Served, Serving

Say = Callable[[str], None]
Keep = Callable[[Results], None]


def measure_bus(device: str, pieces_mib: tuple[int, ...]) -> Results:
    """Begins an experiment's results with the machine's rates, measured in a process of their own."""
    rates = measured_apart(device, f"--pieces-mib={','.join(map(str, pieces_mib))}")
    return Results(device=rates.device, bus=rates.bus, memory_rate=rates.memory)


class Run:
    """An experiment on a checkpoint. `folder` is for files between the processes. `keep` gets the results after each
    contender, so that a run that is stopped early leaves the results so far."""

    def __init__(
        self, experiment: Experiment, checkpoint: Checkpoint, results: Results, folder: Path, say: Say, keep: Keep
    ) -> None:
        self.results = results
        self._experiment = experiment
        self._checkpoint = checkpoint
        self._folder = folder
        self._say = say
        self._keep = keep
        self._logits: dict[str, Logits] = {}
        self._dtype = checkpoint.dtype  # the peers' dtype: djinnd's, once it is known
        self._resident: int | None = None  # blocks that stay on the device with the peers
        wanted = experiment.settings.get("resident")
        if isinstance(wanted, int):
            self._resident = wanted

    def __call__(self, pieces_mib: tuple[int, ...] = ()) -> Results:
        index = int(self.results.device.partition(":")[2] or 0)
        meter = None if self.results.device == "cpu" else nvml_meter(index)
        with DeviceMemory(meter) as memory:
            for contender in CONTENDERS:
                if contender in self._experiment.contenders:
                    turn = partial(self._contend, contender, memory.begin_anew)
                    self._take(self.results.contenders, contender, memory, turn)
            for piece in pieces_mib:
                self._take(self.results.pieces, piece, memory, partial(self._with_piece, piece, memory.begin_anew))
        return self.results

    def _take(self, into: dict[Any, Outcome], key: Any, memory: DeviceMemory, turn: Callable[[], Outcome]) -> None:
        name = key if isinstance(key, str) else f"pieces of {key} MiB"
        self._say(name)
        with memory.watch(name) as watched:
            outcome = turn()
        outcome.peak_bytes = watched.peak
        into[key] = outcome
        if outcome.status is not Status.MEASURED:
            self._say(f"{name}: {outcome.status}: {outcome.note}")
        self.results.phases, self.results.device_memory = memory.phases, memory.curve
        names = [c for c in CONTENDERS if c not in SERVED]
        for compared, found in equality.compare_all(self._logits, names, SERVED).items():
            self.results.contenders[compared].equality = found
        self._keep(self.results)

    def _contend(self, contender: Contender, ready: Callable[[], None]) -> Outcome:
        if contender not in SERVED:
            return self._peer(contender)
        everybody = self._experiment.sessions
        sessions = everybody if contender != "synchronous" else {min(everybody): everybody[min(everybody)]}
        found = self._serve(
            self._experiment.settings_of(contender),
            sessions,
            self._experiment.resident_memory if contender == "resident" else self._experiment.memory,
            ready,
        )
        if found.logits is not None:
            self._logits[contender] = found.logits
        if found.info is not None:
            self._dtype = found.info.dtype
            if contender == "plain" and self._resident is None:
                self._resident = found.info.blocks_plain
        return found.outcome

    def _with_piece(self, piece_mib: int, ready: Callable[[], None]) -> Outcome:
        """Measures `plain` with one session, with copies of that size."""
        settings = self._experiment.settings_of("plain") | {"piece": f"{piece_mib}MiB"}
        sessions, memory = {1: self._experiment.prompt}, self._experiment.memory
        return self._serve(settings, sessions, memory, ready, first_token=False).outcome

    def _serve(
        self,
        settings: dict[str, Any],
        sessions: dict[int, int],
        memory: str,
        ready: Callable[[], None],
        *,
        first_token: bool = True,
    ) -> Served:
        asked, path = self._experiment, self._checkpoint.path
        serving = Serving(
            device=self.results.device,
            memory=memory,
            settings=settings if path is None else {"path": str(path), **settings},
            vocab=self._checkpoint.vocab,
            prompt=asked.prompt,
            tokens=asked.tokens,
            sessions=sessions,
            runs=asked.runs,
            first_token=first_token and asked.ttft,
            shared=asked.model if path is None else None,
        )
        return served.measure(serving, self._say, ready)

    def _peer(self, contender: Contender) -> Outcome:
        if self._resident is None:
            return Outcome(status=Status.SKIPPED, note="how many blocks stay resident is known once `plain` has run")
        asked, logits = self._experiment, self._folder / f"{contender}.npy"
        job = Job(
            checkpoint=str(self._checkpoint.path),
            device=self.results.device,
            dtype=self._dtype,
            memory=asked.memory_bytes,
            resident=self._resident,
            prompt=prompt(asked.prompt, self._checkpoint.vocab, 0),
            tokens=asked.peer_tokens,
            runs=asked.runs,
            logits=str(logits),
            outcome=str(self._folder / f"{contender}.json"),
        )
        outcome = peers.measure(contender, job, self._folder, asked.peer_limit_s)
        if outcome.status is Status.MEASURED:
            self._logits[contender] = np.load(logits)
        return outcome
