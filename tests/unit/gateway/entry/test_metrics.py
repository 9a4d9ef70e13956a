from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from djinn_client.protocol import FinishReason, Generated, ModelInfo, StatusReply, Timings, Usage
from djinnd.gateway.entry.metrics import MAX_MODELS, Metrics


def reply(tokens: int, reason: FinishReason = "stop") -> Generated:
    usage, timings = Usage(prompt_tokens=10, generated_tokens=tokens), Timings(queued=0.5, first_token=1.0, total=3.0)
    return Generated(id=1, text="", token_ids=[], finish_reason=reason, usage=usage, timings=timings)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """By the sample's name and its model."""
    families = text_string_to_metric_families(asyncio.run(metrics.text()).decode())
    return {
        (each.name, each.labels.get("model_name", "")): each.value for family in families for each in family.samples
    }


def test_outputs_count_under_the_names_of_vllm():
    metrics = Metrics("")
    metrics.output("m", reply(5))
    metrics.output("m", reply(1, "length"))
    metrics.output("m", reply(0, "length"))
    metrics.output("m", reply(7, "cancelled"))
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total", "m"] == 40
    assert found["vllm:generation_tokens_total", "m"] == 13
    assert found["vllm:request_queue_time_seconds_sum", "m"] == 1.5
    assert found["vllm:time_to_first_token_seconds_count", "m"] == 2
    assert found["vllm:inter_token_latency_seconds_sum", "m"] == 0.5
    assert found["vllm:e2e_request_latency_seconds_sum", "m"] == 9
    assert b'vllm:request_success_total{finished_reason="length",model_name="m"} 2.0' in asyncio.run(metrics.text())


def test_gauges_are_the_daemon_s():
    metrics = Metrics("")
    models = [ModelInfo(name="m", path="", pages=8, pages_used=2), ModelInfo(name="away", path="")]
    told = {"version": "", "pid": 1, "uptime_s": 1, "address": "", "state": "ready", "devices": [], "sessions": {}}
    metrics.daemon(
        StatusReply(id=1, models=models, requests_running=3, requests_queued=2, connections=1, arena_bytes=0, **told)
    )
    found = samples(metrics)
    assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting", ""]) == (3, 2)
    assert found["vllm:kv_cache_usage_perc", "m"] == 0.25 and ("vllm:kv_cache_usage_perc", "away") not in found


def test_models_that_become_labels_are_bounded():
    metrics = Metrics("")
    for number in range(MAX_MODELS + 10):
        metrics.output(f"m{number}", reply(1))
    assert samples(metrics)["vllm:generation_tokens_total", "other"] == 10
