"""The tuned numbers of the engine. Each is either measured, with what it gave, or chosen."""

from __future__ import annotations

from dataclasses import dataclass

# --- Steps and the loop -----------------------------------------------------------------------------------------------

# Chosen. (tokens, rows) of one step: enough to keep the device busy, and few enough that other requests do not wait
# long.
STEP_ROWS = 256
STEP_LIMITS = {"cpu": (512, STEP_ROWS), "cuda": (2048, STEP_ROWS)}
# By kind of device: whether a decode step is launched before the tokens of the last one are read. A CPU computes a step
# when it is launched, and gains nothing. Measured on an H200, Llama-3-8B: a step of 1, 16, 64 and 256 sessions takes
# 4.68, 5.90, 6.77 and 13.23 ms; one after another 5.33, 6.20, 8.67 and 15.53.
LAUNCHES_AHEAD = {"cpu": False, "cuda": True}
AHEAD_FOR_S = 0.1  # chosen: most seconds of such steps in a row, before other work gets a turn between two steps
ALIVE_EVERY = 0.5  # chosen: seconds between two Alive messages
WORTH = 10  # chosen: collections of the middle generation, after which Python would start a full one
LONGEST = 600.0  # chosen: seconds after a full collection, after which the next one runs even between requests
READ_AT_ONCE = 128  # chosen: spans; reading one takes a few microseconds

# --- Threads of decode steps on a CPU ---------------------------------------------------------------------------------

FIRST_THREAD_TRIAL = 16  # chosen: steps before the first trial of another number, and after a change
RAREST_THREAD_TRIAL = 512  # chosen: most steps between two trials; each one without success doubles them
THREAD_TRIAL_STEPS = 4  # chosen: steps of a trial; it is compared with the last steps before and between them
CLEARLY_FASTER = 0.95  # chosen: a median below this share of the other one counts as faster
HOPELESS = 2.0  # chosen: one step that takes so many times as long ends a trial

# --- Grammars ---------------------------------------------------------------------------------------------------------

PATIENCE = 0.003  # chosen: seconds that a step may wait for masks, in all
LOOK_EVERY = 1.0  # chosen: seconds between two looks for grammar processes that are slow or idle
GRAMMAR_STARTS_IN = 60.0  # chosen: seconds to read a tokenizer of any size
GRAMMAR_ENDS_IN = 0.02  # chosen: seconds, from the end of its stream
GRAMMAR_PROCESSES = 64  # chosen: at a time
GRAMMAR_IDLE = 60.0  # chosen: seconds without a run, after which a process ends

# --- Compilation of kernels -------------------------------------------------------------------------------------------

TELL_EVERY = 0.5  # chosen: most seconds between two calls of `told`
# Chosen. Seconds for the process to import its modules: a minute was too little with a cold disk and busy cores.
COMPILER_STARTS_IN = 180.0
COMPILERS = 2  # chosen: most processes; further loads wait for one to end
NICENESS = 10  # chosen: how much lower than the engine's the priority of the compiling process is
MOST_MEMORY = 8 << 30  # chosen: bytes of data of one fork; LLVM has no limit of its own

# --- Forecast ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForecastTuning:
    """The part of each measured rate (core/rates.py) that steps reach, and times as a number of launches. The values
    below are measured on an H200 with a 13B model (docs/log), at an assumed 4 µs a launch."""

    reading_more: float = 0.93  # of reading, for more rows than one
    reading_packed_one: float = 0.90  # of reading, for one row on packed weights
    reading_packed: float = 0.70  # of reading, for more rows on packed weights
    multiplying: float = 0.89  # of products, for a chunk of prefill
    attending: float = 1.0  # of memory, for the KV of rows that decode
    fetching: float = 0.92  # of the bus: a kernel reads experts on demand
    block_launches: float = 6.5  # of a block beside its products: norms, latency of attention, rotary positions
    step_launches: float = 62.5  # of a step beside its blocks and head: prologue, epilogue, sampler, host work
    call_launches: float = 375  # of a call beside its step: admission, journal, and messages between three processes


FORECAST = {
    "cuda": ForecastTuning(),
    # Measured on one core of a Xeon with djinn-tiny (docs/log), at 2.5 µs a launch: each small operation is a call of
    # Python and torch.
    "cpu": ForecastTuning(multiplying=0.5, attending=0.15, block_launches=150, step_launches=1400, call_launches=1500),
}

# --- Memory -----------------------------------------------------------------------------------------------------------

ANY_POSITIONS = 1 << 20  # chosen: the longest session of a model that names no limit, as Mamba has no positions
MIN_TOKENS = 512  # chosen: shorter sessions make a model not worth loading
FULL_SESSIONS = 64  # Chosen. Automatic KV: never more pages than this many sessions of full length could use.
KV_SHARE = 0.5  # Chosen. Automatic KV: share of the budget that is left, so that a second model can still be loaded.
KV_FLOOR = 1 / 32  # chosen: automatic KV: share of the budget that is set aside before weights are placed
LOGIT_ROWS = 256  # chosen: most rows of logits that exist at once
ROWS_AT_HAND = 32  # chosen: rows for captures, and as many for parked states, before more memory is allocated
DISK_MOST = 0.75  # chosen: share of the free disk, also if more was asked for
ROOM = 1.25  # chosen: pages to keep, as a multiple of the pages in use, so that sessions can go on
GROWTH_BYTES = 64 << 20  # chosen: a tensor of DeviceRows doubles, but grows by no more than this
RESIZED_AT_ONCE = 32  # chosen: pages that are copied at a time when a pool is resized; they exist twice meanwhile

# --- Host pages -------------------------------------------------------------------------------------------------------

PINNED_PIECE = 64 << 20  # measured: bytes that take about ten milliseconds to pin
PIN_PAUSE = 0.001  # chosen: seconds after a piece, to let other calls into the driver
PIN_QUIET = 1.0  # chosen: seconds after the last step, from which pieces are pinned without rests
PIN_REST = 4  # chosen: length of a rest, as a multiple of the last piece's time

# --- Page copies ------------------------------------------------------------------------------------------------------

COPY_BYTES = 64 << 20  # chosen: most bytes of one copy
# Chosen. The same for copies held to a rate, so that each step beside them has about as many as any other.
HELD_BYTES = 16 << 20
IN_FLIGHT = 512 << 20  # chosen: most bytes in a lane, ten milliseconds of PCIe 5
IN_FLIGHT_STREAMING = 64 << 20  # chosen: the same while weights stream
AHEAD_S = 0.004  # Measured. From a step's launch until it begins: 1.4 to 1.7 ms; with 3 ms here many copies were late.
HALF_BYTES = 2 << 20  # chosen: least bytes of a page's half; each half is a copy by itself
TEND_EVERY = 0.25  # chosen: seconds between two calls of Scheduler.tend
# Chosen. Most seconds between two steps of latency-sensitive decodes that alternate with another model's steps.
SPARED_S = 0.1
POLL_S = 0.0005  # chosen: seconds between two polls of the threads

# --- Windows shared with clients --------------------------------------------------------------------------------------

WINDOW_PIECE_BYTES = 32 << 20  # chosen: bytes of one copy
STAGED_BYTES = 512 << 10  # chosen: a window of at most this many bytes is not pinned
