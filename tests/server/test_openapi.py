"""`/openapi.json`, and requests that schemathesis makes of it."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.support.server_kit import serving
from vllm_metal_lite import EngineConfig

# A short context: some of the requests do not say how many tokens they want.
ENGINE = EngineConfig(num_blocks=64, max_num_seqs=8, max_model_len=96)
CHECKS = [
    not_a_server_error,
    checks.response_schema_conformance,
    checks.content_type_conformance,
    checks.negative_data_rejection,
]
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# What the description leaves to other checks, by operation.
POSTS = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 4},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "hi", "text_2": ["a", "b"]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": HI,
    "/v1/messages/count_tokens": HI,
    "/tokenize": {"prompt": "hi", "messages": None},
    "/detokenize": {"tokens": [5]},
}
GETS = ["/health", "/metrics", "/status", "/version", "/v1/models", "/v1/models/{name}"]
RUN = settings(
    max_examples=10,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.fixture(scope="module")
def url():
    with serving(engine=ENGINE) as running:
        yield running.url


@pytest.fixture(scope="module")
def described(url):
    return httpx.get(f"{url}/openapi.json").json()


@pytest.mark.parametrize("path", GETS)
def test_what_may_be_read(url, described, path):
    @RUN
    @given(case=schemathesis.openapi.from_dict(described)[path]["GET"].as_strategy())
    def check(case):
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)

    check()


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_the_description_allows(url, described, path):
    """Some are refused for what it does not say: no token fits, a regex is none, ..."""
    statuses = set()

    @RUN
    @given(case=schemathesis.openapi.from_dict(described)[path]["POST"].as_strategy())
    def check(case):
        case.body = {**case.body, **POSTS[path], "model": "demo"}
        statuses.add(case.call_and_validate(base_url=url, checks=CHECKS, timeout=60).status_code)

    check()
    assert statuses in ({200}, {200, 400})


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_the_description_forbids(url, described, path):
    made = schemathesis.openapi.from_dict(described)[path]["POST"]

    @RUN
    @given(case=made.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case):
        if isinstance(case.body, dict):  # so that only the fault is at fault
            case.body = {**POSTS[path], **case.body}
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)

    check()


@pytest.mark.parametrize(
    ("field", "size", "most"),
    [
        ("messages", "maxItems", 2_048),
        ("stop", "maxItems", 128),
        ("tools", "maxItems", 1_024),
        ("logit_bias", "maxProperties", 4_096),
    ],
)
def test_limits_of_lists_are_described(described, field, size, most):
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert f"'{size}': {most}" in str(schema["properties"][field])


def test_all_that_may_be_asked_is_described(described):
    found = {path: set(methods) for path, methods in described["paths"].items()}
    gets = {path: {"get"} for path in [*GETS, "/events"]}
    assert found == gets | {path: {"post"} for path in POSTS}
    body = described["paths"]["/v1/responses"]["post"]["requestBody"]["content"]
    fields = body["application/json"]["schema"]["properties"]
    assert fields["max_output_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1}
