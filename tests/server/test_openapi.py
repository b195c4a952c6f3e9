"""The document from which clients are made."""

import jsonschema
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def document(http):
    return http.get("/openapi.json").json()


def test_every_endpoint_is_there_and_every_reference_leads_somewhere(document, http):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answer = (
                http.request(method, path.replace("{name}", "demo"), json=None, timeout=60)
                if path != "/events"
                else None
            )
            assert answer is None or answer.status_code not in (404, 405), path
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                name = schema["$ref"].rpartition("/")[2]
                assert document["components"]["schemas"][name]["type"] == "object"
    ids = [operation["operationId"] for m in document["paths"].values() for operation in m.values()]
    assert len(set(ids)) == len(ids)


def test_a_sampling_parameter_is_described_by_its_rule(document):
    for name in ("ChatCompletionRequest", "ResponsesRequest", "MessagesRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        assert fields["top_p"]["description"] == "a number above 0 and at most 1"


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"temperature": 0.5, "max_tokens": 5, "stop": ["a"], "seed": None}, True),
        ({"temperature": "hot"}, False),
        ({"max_completion_tokens": "five"}, False),
        ({"messages": 5}, False),
    ],
)
def test_the_schema_of_a_chat(document, fields, is_valid):
    parts = document["components"]["schemas"]
    schema = {
        "$ref": "#/components/schemas/ChatCompletionRequest",
        "components": {"schemas": parts},
    }
    assert jsonschema.Draft202012Validator(schema).is_valid({**CHAT, **fields}) == is_valid
