"""Metrics of engines and requests, as text for Prometheus.

Names, labels and buckets are those of vLLM 0.33 (vllm/v1/metrics), so that its dashboards work:

- An answer is a request there: a request with `n` answers counts its prompt n times, and each
  answer that ends counts in `request_success`.  Histograms of finished requests count a request
  once.
- A request that ends early counts its tokens, and those of its answers that have ended.
- An inter-token latency is the time between two steps of a request that brought tokens, as the
  server received them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from vllm_metal_lite.server.models import Models
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.request_state import RequestState


def _buckets(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_LATENCY = _buckets("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_FIRST_TOKEN = _buckets(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_INTER_TOKEN = _buckets(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
# vLLM stops at the context's length.  Here all models share the buckets.
_TOKENS = (*(m * 10**e for e in range(6) for m in (1, 2, 5)), 10**6)
_ANSWERS = (1, 2, 5, 10, 20)

_GAUGES = {
    "num_requests_running": "Requests that the engine computes.",
    "num_requests_waiting": "Requests that wait for the engine.",
    "kv_cache_usage_perc": "The share of blocks that requests own; 1 is all of them.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "How often requests lost their blocks for a while.",
    "spec_decode_num_draft_tokens": "Draft tokens computed.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became part of an answer.",
    "prompt_tokens": "Prompt tokens of requests that got their first token, cached ones included.",
    "prompt_tokens_cached": "Prompt tokens that were cached.",
    "external_prefix_cache_hits": "Cached prompt tokens that came from the disk.",
    "generation_tokens": "Generated tokens.",
}
_ENGINE_KEYS = {  # Prometheus counter -> key in LLMEngine.metrics()
    "prefix_cache_queries": "prefix_cache_queried_tokens",
    "prefix_cache_hits": "prefix_cache_hit_tokens",
    "num_preemptions": "preemptions",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From the arrival to the first token."),
    "inter_token_latency_seconds": (_INTER_TOKEN, "Between two steps of a request."),
    "request_time_per_output_token_seconds": (_INTER_TOKEN, "Mean time per token after the first."),
    "e2e_request_latency_seconds": (_LATENCY, "From the arrival to the last token."),
    "request_queue_time_seconds": (_LATENCY, "From the arrival to the first step."),
    "request_inference_time_seconds": (_LATENCY, "From the first step to the last token."),
    "request_prefill_time_seconds": (_LATENCY, "From the first step to the first token."),
    "request_decode_time_seconds": (_LATENCY, "From the first token to the last."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of a request."),
    "request_prefill_kv_computed_tokens": (_TOKENS, "Prompt tokens that were not cached."),
    "request_generation_tokens": (_TOKENS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (_TOKENS, "Generated tokens of its longest answer."),
    "request_params_max_tokens": (_TOKENS, "max_tokens of a request that has it."),
    "request_params_n": (_ANSWERS, "n of a request."),
}
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The metrics of one server; labels are by the name that requests call a model."""

    def __init__(self, models: Models) -> None:
        self._models, self._registry = models, (registry := CollectorRegistry())
        label = ("model_name",)
        families: dict[str, Any] = {}
        for kind, described in (Gauge, _GAUGES), (Counter, _COUNTERS):
            for name, text in described.items():
                families[name] = kind(f"vllm:{name}", text, label, registry=registry)
        for name, (buckets, text) in _HISTOGRAMS.items():
            families[name] = Histogram(
                f"vllm:{name}", text, label, buckets=buckets, registry=registry
            )
        ends = (*label, "finished_reason")
        success = Counter("vllm:request_success", "Finished answers.", ends, registry=registry)
        self._of_model: dict[str, dict[str, Any]] = {
            model: {name: family.labels(model) for name, family in families.items()}
            | {reason: success.labels(model, reason) for reason in _REASONS}
            for model in models.by_name
        }
        # The counters of each engine when they were last read.
        self._seen: WeakKeyDictionary[EngineClient, dict[str, int]] = WeakKeyDictionary()

    @contextmanager
    def counting(self, name: str, engine: EngineClient) -> Iterator["RequestCount"]:
        """Counts a request of this model's engine, until the end of the block."""
        count = RequestCount(self._of_model[name])
        try:
            yield count
        finally:
            count.end()
            self._read(name, engine)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type.  accept: the request's Accept header."""
        for name in self._models.by_name:
            engine = self._models.loaded.get(name)
            if engine is not None:
                self._read(name, engine)
            else:
                for gauge in _GAUGES:
                    self._of_model[name][gauge].set(0)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _read(self, name: str, engine: EngineClient) -> None:
        """Take over the latest metrics of an engine, which counts from 0 when it is loaded."""
        of_model, now = self._of_model[name], engine.metrics
        if not now:
            return
        of_model["num_requests_running"].set(now["requests_running"])
        of_model["num_requests_waiting"].set(now["requests_waiting"])
        of_model["kv_cache_usage_perc"].set(now["blocks_owned"] / now["blocks_total"])
        seen = self._seen.get(engine, {})
        for counter, key in _ENGINE_KEYS.items():
            of_model[counter].inc(max(now[key] - seen.get(key, 0), 0))
        self._seen[engine] = now


class RequestCount:
    """Counts one request.

    metrics: the metrics of its model, by name.  request: None until the engine has accepted it.
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.request: RequestState | None = None
        self._metrics = metrics
        self._num_tokens = 0
        self._at: float | None = None  # when the latest tokens came
        self._observe_gap = metrics["inter_token_latency_seconds"].observe
        self._add_tokens = metrics["generation_tokens"].inc

    def update(self, request: RequestState, now: float) -> None:
        """A step has brought something.  Called for each token, so it must be cheap."""
        num_tokens = request.num_tokens
        if num_tokens == self._num_tokens and not request.only_reads:
            return
        self._add_tokens(num_tokens - self._num_tokens)
        if self._at is None:
            metrics = self._metrics
            metrics["prompt_tokens"].inc(len(request.prompt_token_ids) * request.params.n)
            metrics["prompt_tokens_cached"].inc(request.num_cached_tokens)
            metrics["external_prefix_cache_hits"].inc(request.num_restored_tokens)
            metrics["time_to_first_token_seconds"].observe(now - request.times.arrived)
        else:
            self._observe_gap(now - self._at)
        self._num_tokens, self._at = num_tokens, now

    def end(self) -> None:
        """The request has ended, or its client has gone."""
        request, metrics = self.request, self._metrics
        if request is None:
            return
        for reason in request.finish_reasons:
            if request.finished or reason is not None:
                metrics[reason or "error"].inc()
        times, params = request.times, request.params
        scheduled, first, last = times.scheduled, times.first_token, times.finished
        if scheduled is None or first is None or last is None:
            return  # the engine was lost, or the request ended early
        num_prompt = len(request.prompt_token_ids)
        lengths = request.num_tokens_of
        decode = last - first
        values = {
            "e2e_request_latency_seconds": last - times.arrived,
            "request_queue_time_seconds": scheduled - times.arrived,
            "request_inference_time_seconds": last - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": decode,
            "request_time_per_output_token_seconds": decode / max(max(lengths) - 1, 1),
            "request_prompt_tokens": num_prompt,
            "request_prefill_kv_computed_tokens": num_prompt - request.num_cached_tokens,
            "request_generation_tokens": sum(lengths),
            "request_max_num_generation_tokens": max(lengths),
            "request_params_n": params.n,
        }
        if params.max_tokens and not request.only_reads:
            values["request_params_max_tokens"] = params.max_tokens
        for name, value in values.items():
            metrics[name].observe(value)
