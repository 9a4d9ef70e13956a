"""The experiments of docs/results.md: the question, the command, and the functions that put the figures into words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.results import inside, paging, serving, sharing
from tools.results.raw import Report

MODELS = {
    "m13": "Llama-2-13B",
    "oss": "gpt-oss-20b",
    "oss120": "gpt-oss-120b",
    "l8": "Llama-3.1-8B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-30b": "Qwen3-30B-A3B with 24 of 48 blocks",
    "l70": "Llama-2-70B with 60 of 80 blocks in FP8",
    "q36": "Qwen3.6-35B-A3B with 8 of 40 blocks in FP8",
    "llama-2-13b": "Llama-2-13B",
    "m7": "Llama-2-7B",
    "gpt2": "GPT-2",
    "smollm2-135m": "SmolLM2-135M",
}


def model_of(result: Report) -> str:
    """The model in words, or nothing where an experiment has none."""
    model = result.parameters.get("model") or result.parameters.get("models", "")
    if isinstance(model, dict):  # of a streaming experiment
        return str(model["shape"]).replace("llama-2-", "Llama-2-").replace("b", "B")
    names = model if isinstance(model, list) else [model]
    return ", ".join(MODELS.get(name, str(name)) for name in names)


def nothing(_: Report) -> str:
    return ""


def as_printed(result: Report) -> str:
    return result.summary


@dataclass(frozen=True)
class Experiment:
    question: str
    module: str
    figures: Callable[[Report], str]
    options: tuple[str, ...] = ("memory",)  # parameters that the command names
    within: Callable[[Report], str] = nothing  # tells rows of one model apart
    peers: Callable[[Report], str] = nothing
    arguments: Callable[[Report], str] = lambda _: "CHECKPOINT"  # of the command, before its options

    def case(self, result: Report) -> str:
        return ", ".join(filter(None, (model_of(result), self.within(result))))

    def command(self, result: Report) -> str:
        values = {name: result.parameters.get(name) for name in self.options}
        given = (f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value is not None)
        return " ".join(filter(None, ("python -m", self.module, self.arguments(result), *given)))


def experiment_of(name: str) -> Experiment:
    """An experiment that has no words yet shows the line that its bench prints."""
    return EXPERIMENTS.get(name, Experiment(f"{name}:", f"tools.bench.{name}", as_printed))


EXPERIMENTS: dict[str, Experiment] = {
    "decode": Experiment(
        "First token of a prompt, and a step of 1 and of 16 sessions, all weights on the card:",
        "tools.bench.serving.decode",
        serving.decode,
        peers=serving.decode_peers,
    ),
    "cpu": Experiment(
        "The CPU as a device, in turns with transformers' `generate` in bfloat16:",
        "tools.bench.peers.cpu",
        serving.cpu,
        options=("dtype", "rounds", "prompt", "context", "tokens"),
        within=lambda result: f"{result.parameters['threads']} threads",
        peers=serving.cpu_peers,
    ),
    "stored": Experiment(
        "Weights as the checkpoint stores them, in their codes:",
        "tools.bench.serving.stored",
        serving.stored,
        options=("memory", "kv_gib", "draft", "part"),
        within=lambda result: f"{result.parameters['memory']} of device memory",
    ),
    "stream": Experiment(
        "A model larger than its share of the card:",
        "tools.bench.stream",
        serving.stream,
        within=lambda result: f"{result.parameters['memory']} of device memory",
        peers=serving.stream_peers,
        options=(),
        arguments=lambda result: f"tools/bench/configs/{result.parameters['name']}.yaml",
    ),
    "forecast": Experiment(
        "What `djinnctl plan` foretells, beside what is measured:",
        "tools.bench.serving.forecast",
        serving.forecast,
        options=(),
        arguments=serving.forecast_arguments,
    ),
    "budget": Experiment(
        "The device budget is changed while 16 sessions generate:",
        "tools.bench.serving.budget",
        serving.budget,
        options=(),
    ),
    "ipc": Experiment(
        "What the daemon adds to the engine that it drives:",
        "tools.bench.serving.ipc",
        serving.ipc,
        options=("tokens", "rounds"),
        arguments=nothing,
    ),
    "restart": Experiment("From the daemon's start to a first token:", "tools.bench.paging.restart", serving.restart),
    "restart_sessions": Experiment(
        "A warm restart that keeps sessions and their KV:",
        "tools.bench.paging.restart_sessions",
        paging.restart_sessions,
        options=("memory", "kv", "host_kv", "sessions", "context"),
    ),
    "kv": Experiment(
        "A session's pages between device, host and disk:",
        "tools.bench.paging.kv",
        paging.kv,
        options=("memory", "tokens", "steps", "rounds"),
    ),
    "resume": Experiment(
        "The next token of a session that had left the card:",
        "tools.bench.paging.resume",
        paging.resume,
        peers=paging.resume_peers,
    ),
    "turns": Experiment(
        "A long session that leaves the card in each wait for a tool:",
        "tools.bench.paging.turns",
        paging.turns,
        options=("memory", "host_kv", "tokens", "turns", "new"),
    ),
    "oversubscribe": Experiment(
        "More sessions than the card has room for:",
        "tools.bench.paging.oversubscribe",
        paging.oversubscribe,
        options=("memory", "kv", "host_kv", "disk_kv", "sessions", "context", "new", "turns"),
        within=lambda result: f"{result.parameters['sessions']} sessions of {result.parameters['context']:,} tokens",
    ),
    "agents": Experiment(
        "Agents that call tools of 10 to 20 s between their answers:",
        "tools.bench.agents",
        paging.agents,
        options=("memory", "kv", "host_kv", "disk_kv", "reference_memory", "seed"),
        arguments=paging.agents_arguments,
        within=paging.agents_case,
        peers=paging.agents_peers,
    ),
    "fairness": Experiment(
        "Shares and classes:",
        "tools.bench.serving.fairness",
        sharing.fairness,
        options=("memory", "seconds"),
        arguments=sharing.fairness_arguments,
        within=sharing.fairness_case,
    ),
    "decisions": Experiment(
        "What it costs the scheduler to decide a step:",
        "tools.bench.simulator.decisions",
        sharing.decisions,
        options=("steps",),
        within=sharing.decisions_case,
        arguments=sharing.decisions_arguments,
    ),
    "simulate": Experiment(
        "The scheduler in virtual time:",
        "tools.bench.simulator",
        sharing.simulate,
        options=(),
        within=lambda result: ", ".join(result.parameters["load"]["groups"]),
        arguments=lambda result: result.summary.split(":")[0],
    ),
    "simulate-check": Experiment(
        "The simulator beside a daemon with the same load:",
        "tools.bench.simulator",
        sharing.simulate_check,
        options=("kv",),
        within=lambda result: f"{result.parameters.get('kv', '32MiB')} of pages",
        arguments=lambda _: "--check CHECKPOINT",
    ),
    "breakpoints": Experiment(
        "Stopping between two blocks, and going on:",
        "tools.bench.whitebox.breakpoints",
        inside.breakpoints,
        options=("calls",),
    ),
    "resume_inside": Experiment(
        "A prompt has stopped between two blocks; time to the next token:",
        "tools.bench.whitebox.resume_inside",
        inside.resume_inside,
        options=("memory", "tokens"),
        peers=inside.resume_inside_peers,
    ),
    "white_table": Experiment(
        "Stop behind one of five blocks, scale the activations, generate on:",
        "tools.bench.whitebox.table",
        inside.white_table,
        options=("memory", "prompts", "tokens"),
        within=lambda result: f"{result.parameters['tokens']} tokens",
        peers=inside.white_table_peers,
    ),
    "whitebox": Experiment(
        "What other sessions lose while 8 are steered, and reading activations:",
        "tools.bench.whitebox",
        inside.whitebox,
        options=("tokens", "rounds"),
    ),
    "structured": Experiment(
        "What a grammar adds to a token:", "tools.bench.serving.structured", as_printed, arguments=nothing
    ),
    "http": Experiment(
        "What HTTP adds to the native client, and idle streams to the gateway:",
        "tools.bench.serving.http",
        as_printed,
        arguments=nothing,
        options=("streams", "idle", "rounds"),
    ),
    "burst": Experiment(
        "Many prompts at once, each with an answer of its own:",
        "tools.bench.serving.burst",
        as_printed,
        options=("sessions", "context", "tokens"),
    ),
    "beside": Experiment(
        "Decode of a model that streams, with the host's cores beside the bus:",
        "tools.bench.stream.beside",
        as_printed,
        options=("memory", "resident", "kv", "quantise"),
        within=lambda result: result.parameters.get("quantise") or "",
    ),
    "speculation": Experiment(
        "Decode with guesses, from a session's own text and from a draft:",
        "tools.bench.serving.speculation",
        as_printed,
        options=("memory", "kv_gib", "draft", "part"),
        within=lambda result: f"{result.results['blocks_streamed']} blocks streamed beside the draft",
    ),
    "prefill": Experiment(
        "First tokens of long prompts, beside large products and contiguous attention:",
        "tools.bench.engine.prefill",
        as_printed,
    ),
    "kernels": Experiment(
        "Attention's kernels beside the rate of memory:", "tools.bench.kernels", as_printed, arguments=nothing
    ),
}
