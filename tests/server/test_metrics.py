"""`/metrics`: what a dashboard for vLLM reads."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server.command import eventually
from tests.support.server.raw_http import CHAT
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.prometheus import Metrics
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.worker.messages import Add, Delta, EngineLost
from vllm_metal_lite.server.worker.request_state import RequestState, news_of

# The names in the dashboards of vLLM (examples/observability).
DASHBOARDS = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "num_preemptions_total",
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_max_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_max_num_generation_tokens_count",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_bucket",
]


def scrape(http):
    """Values by name and, if there are any, labels beside the model's name."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            rest = [v for k, v in sample.labels.items() if k != "model_name"]
            values[":".join([sample.name.removeprefix("vllm:"), *rest])] = sample.value
    return values


def since(http, before):
    return {name: value - before.get(name, 0) for name, value in scrape(http).items()}


def ask(http, content, max_tokens):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    assert http.post(CHAT, json=body).status_code == 200


@asynccontextmanager
async def generating(running, prompt, params):
    """A request inside of the server, and its engine."""
    async with AsyncExitStack() as stack:
        model, engine = await stack.enter_async_context(running.server.models.use(None))
        serving = Serving(running.server, model.name, engine, stack)
        yield await serving.generate("test-", prompt, params), engine


def generate(running, prompt, params, take=None):
    """Run a request; take: leave after as many changes."""

    async def run():
        async with generating(running, prompt, params) as (request, _):
            news = news_of([request])
            for _ in range(take or 0):
                await anext(news)
            if take is None:
                await request.complete()
            return request

    return asyncio.run_coroutine_threadsafe(run(), running.loop).result(60)


def test_every_name_of_the_dashboards_is_there_before_the_first_request(http):
    names = {name.partition(":")[0] for name in scrape(http)}
    assert names >= set(DASHBOARDS)


def test_the_counts_of_requests_add_up(running, http):
    before = scrape(http)
    for i, max_tokens in enumerate((1, 5, 7)):
        ask(http, f"{i} hello", max_tokens)
    got = since(http, before)
    ends = sum(got[f"request_success_total:{reason}"] for reason in ("stop", "length"))
    assert ends == 3
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert got[f"{name}_seconds_count"] == 3
        assert got[f"{name}_seconds_sum"] > 0
    tokens = got["generation_tokens_total"]
    assert 3 <= tokens <= 13
    assert got["request_generation_tokens_sum"] == tokens
    assert got["inter_token_latency_seconds_count"] == tokens - 3
    assert got["request_prompt_tokens_sum"] == got["prompt_tokens_total"] > 0
    assert got["request_params_max_tokens_sum"] == 13
    parts = sum(got[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(got["e2e_request_latency_seconds_sum"])


def test_each_answer_counts_as_a_request_of_its_own(running, http):
    before = scrape(http)
    params = SamplingParams(max_tokens=4, n=3, ignore_eos=True)
    generate(running, list(range(1, 11)), params)
    got = since(http, before)
    assert got["request_success_total:length"] == 3
    assert got["generation_tokens_total"] == 12
    assert got["prompt_tokens_total"] == 30
    assert got["request_params_n_sum"] == 3
    assert got["e2e_request_latency_seconds_count"] == 1


def test_a_prefix_that_was_cached(running, http):
    prompt = [7, 9] * 40
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    generate(running, prompt, params)
    before = scrape(http)
    request = generate(running, prompt, params)
    got = since(http, before)
    assert request.num_cached_tokens >= 64
    assert got["prefix_cache_hits_total"] == request.num_cached_tokens
    assert got["prefix_cache_queries_total"] == len(prompt)
    assert got["prompt_tokens_cached_total"] == request.num_cached_tokens
    computed = len(prompt) - request.num_cached_tokens
    assert got["request_prefill_kv_computed_tokens_sum"] == computed


def test_a_request_whose_client_goes_counts_its_tokens_and_no_end(running, http):
    before = scrape(http)
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    request = generate(running, [3, 4, 5], params, take=3)
    got = since(http, before)
    assert not request.finished
    assert got["generation_tokens_total"] == request.num_tokens >= 3
    assert got["prompt_tokens_total"] == 3
    assert not any(got[f"request_success_total:{r}"] for r in ("stop", "length", "abort", "error"))
    assert got["e2e_request_latency_seconds_count"] == 0


def test_gauges_are_0_when_nothing_runs(http):
    ask(http, "hello", 2)
    eventually(lambda: not scrape(http)["num_requests_running"])
    now = scrape(http)
    assert now["num_requests_running"] == now["num_requests_waiting"] == 0
    assert now["kv_cache_usage_perc"] == 0


def test_gauges_while_requests_run(running, http):
    async def look():
        params = SamplingParams(max_tokens=3000, ignore_eos=True)
        async with generating(running, [1, 2, 3], params) as (_, engine):
            engine.metrics = {}
            while not engine.metrics.get("requests_running"):
                await asyncio.sleep(0.01)
            return running.server.metrics.text("")[0].decode()

    text = asyncio.run_coroutine_threadsafe(look(), running.loop).result(60)
    assert 'vllm:num_requests_running{model_name="demo"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="demo"} 0.0\n' not in text


class _Models:
    def __init__(self):
        self.by_name, self.loaded = {"a": None}, {}


class _Engine:
    def __init__(self, hits, owned=0):
        self.metrics = {"prefix_cache_hit_tokens": hits, "prefix_cache_queried_tokens": 2 * hits}
        self.metrics |= {"preemptions": 0, "requests_running": 1, "requests_waiting": 0}
        self.metrics |= {"blocks_owned": owned, "blocks_total": 4}
        self.metrics |= {"draft_tokens": 0, "accepted_tokens": 0}


def test_counters_go_on_when_an_engine_is_loaded_again():
    models = _Models()
    metrics = Metrics(models)

    def value(name):
        text = metrics.text("")[0].decode()
        return next(float(li.split()[1]) for li in text.splitlines() if li.startswith(name))

    hits, usage = "vllm:prefix_cache_hits_total", "vllm:kv_cache_usage_perc"
    models.loaded["a"] = _Engine(50, owned=1)
    assert (value(hits), value(hits), value(usage)) == (50, 50, 0.25)
    models.loaded.clear()
    assert (value(hits), value(usage)) == (50, 0)
    models.loaded["a"] = _Engine(7)
    assert (value(hits), value(hits)) == (57, 57)


def test_a_request_of_an_engine_that_is_gone_counts_for_its_model():
    metrics = Metrics(_Models())
    with metrics.counting("a", _Engine(3)):
        pass  # the engine ends before the request
    text = metrics.text("")[0].decode()
    assert 'vllm:prefix_cache_hits_total{model_name="a"} 3.0' in text
    assert 'vllm:num_requests_running{model_name="a"} 0.0' in text
    assert text.count("vllm:num_requests_running{") == 1


def counted(*changes):
    """The samples after a request of two prompt tokens; changes: made to its RequestState."""
    metrics = Metrics(_Models())
    with metrics.counting("a", _Engine(0)) as count:
        params = SamplingParams(stop="z")  # so that no tokenizer makes the text
        request = RequestState(Add("x", [1, 2], params), None, count.update)
        for change in changes:
            change(request)
        count.request = request
    text = metrics.text("")[0].decode()
    families = text_string_to_metric_families(text)
    return {
        ":".join([s.name.removeprefix("vllm:"), s.labels.get("finished_reason", "")]): s.value
        for family in families
        for s in family.samples
    }


def token(request, **end):
    request.prefilled(1.0, 0, 0, None, None)
    request.take([Delta(0, [5], "", **end)])


def test_tokens_that_come_before_the_acceptance_is_noticed():
    got = counted(token, token, lambda g: token(g, finish_reason="length"))
    assert got["generation_tokens_total:"] == 3
    assert got["inter_token_latency_seconds_count:"] == 2
    assert got["request_success_total:length"] == 1


def test_a_request_whose_engine_is_lost_ends_with_error():
    got = counted(token, lambda g: g.fail(EngineLost("gone")))
    assert got["generation_tokens_total:"] == 1
    assert got["request_success_total:error"] == 1
    assert got["e2e_request_latency_seconds_count:"] == 0
