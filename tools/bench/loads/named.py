"""Loads with names. `tools/bench/agents` measures the same agents, and `tools/bench/serving/fairness.py` the sessions
of `asking` and `asking beside bulk`."""

from __future__ import annotations

import msgspec

from tools.bench.loads.load import Group, Load

_AGENT = Group(
    priority="agent",
    sessions=80,
    rate=5.0,
    context=(2048, 2048),
    prompt=(64, 64),
    answer=(50, 50),
    calls=5,
    pause_s=(10.0, 20.0),
    tells="expected",
)
_CHAT = Group(
    priority="interactive",
    sessions=16,
    context=(100, 800),
    prompt=(20, 120),
    answer=(60, 300),
    calls=10,
    pause_s=(5.0, 60.0),
)
_BATCH = Group(priority="batch", sessions=32, context=(400, 800), answer=(200, 400))

ASKING = Group(
    priority="interactive",
    sessions=4,
    context=(32, 64),
    prompt=(16, 32),
    answer=(24, 48),
    calls=50,
    pause_s=(0.2, 0.6),
)
BULK = Group(priority="batch", sessions=32, context=(64, 128), answer=(100, 200))

DAY = 86_400.0

LOADS = {
    "agents": Load(seconds=140, groups={"agents": _AGENT}),
    "silent agents": Load(seconds=140, groups={"agents": msgspec.structs.replace(_AGENT, tells="none")}),
    "mix": Load(seconds=120, groups={"chat": _CHAT, "batch": _BATCH}),
    "asking": Load(seconds=60, groups={"asking": ASKING}),
    "asking beside bulk": Load(seconds=60, groups={"asking": ASKING, "batch": BULK}),
    "tenants": Load(
        seconds=120,
        groups={
            f"tenant {tenant}": Group(
                priority="batch", sessions=400, tenants=(tenant,), context=(20, 40), answer=(100, 300)
            )
            for tenant in (1, 2, 3)
        },
        weights={1: 1.0, 2: 2.0, 3: 4.0},
    ),
    "rows": Load(  # four equal tenants; one has 50 times the sessions
        seconds=60,
        groups={
            f"tenant {tenant}": Group(
                priority="batch", sessions=count, tenants=(tenant,), context=(20, 40), answer=(100, 300)
            )
            for tenant, count in ((1, 100), (2, 100), (3, 100), (4, 5000))
        },
    ),
    "day": Load(  # 10,000 sessions that come and go
        seconds=DAY,
        groups={
            "agents": Group(
                priority="agent",
                sessions=6000,
                rate=6000 / DAY,
                tenants=tuple(range(20)),
                context=(512, 2048),
                prompt=(32, 128),
                answer=(30, 100),
                calls=6,
                pause_s=(5.0, 30.0),
                tells="tool",
            ),
            "chat": Group(
                priority="interactive",
                sessions=3500,
                rate=3500 / DAY,
                tenants=tuple(range(20, 40)),
                context=(100, 800),
                prompt=(20, 120),
                answer=(40, 160),
                calls=4,
                pause_s=(5.0, 60.0),
            ),
            "batch": Group(
                priority="batch",
                sessions=500,
                rate=500 / DAY,
                tenants=tuple(range(40, 44)),
                context=(1000, 3000),
                answer=(200, 800),
            ),
        },
    ),
    "crowd": Load(  # 10,000 sessions that are alive at once
        seconds=600,
        groups={
            "agents": Group(
                priority="agent",
                sessions=10_000,
                tenants=tuple(range(40)),
                context=(200, 400),
                prompt=(16, 32),
                answer=(20, 40),
                calls=1000,
                pause_s=(120.0, 600.0),
                tells="expected",
            )
        },
    ),
}
