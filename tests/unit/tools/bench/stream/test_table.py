from __future__ import annotations

from tools.bench.stream.outcome import Equality, Found, Outcome, Results, Status
from tools.bench.stream.table import rows, summary


def found(step_s: dict[int, list[float]], streamed: int, blocks: tuple[int, int, int] | None = None) -> Found:
    plain, packed, passing = blocks or (None, None, None)
    return Found(
        first_token_s=[0.3, 0.1, 0.2],
        step_s=step_s,
        streamed_bytes=streamed,
        resident_blocks=plain,
        packed_blocks=packed,
        streamed_blocks=passing,
    )


PLAIN = Outcome(
    status=Status.MEASURED,
    found=found({1: [0.2, 0.1, 0.3], 16: [0.4]}, 10_000_000_000, (29, 0, 11)),
    equality=Equality(max_difference=0.25, argmax_share=0.5, last_argmax=True, as_resident=True),
    peak_bytes=23 << 30,
)
PEER = Outcome(status=Status.MEASURED, found=found({1: [1.5]}, 10_000_000_000))
FULL = Outcome(status=Status.OUT_OF_MEMORY, note="Tried to allocate 20 MiB.")


def results(**contenders: Outcome) -> Results:
    return Results(device="cuda:0", bus={16: 40e9, 128: 50e9}, memory_rate=4e12, contenders=contenders)


def test_each_number_of_sessions_has_a_row() -> None:
    one, sixteen = rows("plain", PLAIN, ceiling=100e9)
    assert one[:8] == ["plain", "29 + 0 + 11", "10", "1", "200.0 (50.0%)", "200.00", "5.0", "50.00"]
    assert one[8:] == ["50.0%", "23.0", "2.50e-01", "50.0%", "bit for bit"]
    assert sixteen[:9] == ["", "", "", "16", "", "400.00", "40.0", "25.00", "25.0%"]
    assert sixteen[9:] == [""] * 4


def test_a_failed_contender_has_a_row_as_long_as_the_others() -> None:
    (row,) = rows("gpu-only", FULL, ceiling=100e9)
    assert row[:2] == ["gpu-only", "out of memory"] and not any(row[2:])
    assert len(row) == len(next(iter(rows("plain", PLAIN, ceiling=100e9))))


def test_the_summary_names_every_contender() -> None:
    said = summary(results(plain=PLAIN, accelerate=PEER, gpu=FULL), prompt=512)
    assert said.split("; ") == [
        "bus 50.0 GB/s",
        "plain: first token of 512 200 ms, 1 session 200.0 ms a step (100.0% of the bus), "
        "16 sessions 400.0 ms a step (50.0% of the bus), bit for bit, 23.0 GiB",
        "accelerate: first token of 512 200 ms, 1 session 1500.0 ms a step (13.3% of the bus), 7.5 times plain",
        "gpu: out of memory",
    ]
