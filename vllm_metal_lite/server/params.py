"""The sampling parameters of a request: its own, else the model's, else vLLM's defaults."""

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, create_model
from pydantic_core import PydanticCustomError

from vllm_metal_lite.engine.prompt_ids import check_salt
from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.rules import by_token_id
from vllm_metal_lite.sampling.sampler import validate
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.body import B, Body
from vllm_metal_lite.server.errors import ApiError, must_be
from vllm_metal_lite.server.request_limits import MAX_N
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.structured import with_form

# Fields of SamplingParams that an API calls otherwise.
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
}
# Fields of SamplingParams that only some APIs have, or that have another name or meaning there.
_OF_EACH_API = ("n", "max_tokens", "logprobs", "prompt_logprobs", "thinking")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def _refuse(value: Any) -> None:
    if value not in _NOTHING:
        raise PydanticCustomError("unsupported", "not supported")


# The type of a field that this server lacks and that would change the answer.
Unsupported = Annotated[None, BeforeValidator(_refuse)]
# The type of `modalities`: only ["text"] is accepted.
OnlyText = Annotated[
    Unsupported, BeforeValidator(lambda value: None if value == ["text"] else value)
]


class ScheduledBody(Body):
    """A body whose request is scheduled: it may have a priority and a cache salt."""

    priority: int | None = None
    cache_salt: Any = None

    def scheduling(self) -> dict[str, Any]:
        """The arguments for `Serving.generate`.  Raises RequestError."""
        return {"priority": self.priority or 0, "cache_salt": check_salt(self.cache_salt)}


def _with_sampling_fields(body: type[B]) -> type[B]:
    """Add the fields of SamplingParams that all APIs take under the same names."""
    names = [f.name for f in fields(SamplingParams) if f.name not in _OF_EACH_API]
    added: dict[str, Any] = dict.fromkeys(names, (Any, None))
    return create_model(body.__name__, __base__=body, __module__=body.__module__, **added)


@_with_sampling_fields
class SamplingFields(ScheduledBody):
    """Fields under vLLM's names that every API takes; None: not given.

    `sampling_params` checks the values, so that all APIs say the same of bad ones.
    """

    stream: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of this body that SamplingParams has too; None: not given.

        Not `thinking`: Anthropic's API gives that name to something else.
        """
        own = type(self).model_fields.keys() - {"thinking"}
        given = {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in own}
        return given | {plain: getattr(self, name) for plain, name in self.names().items()}

    def names(self) -> dict[str, str]:
        """The API's name of each field of SamplingParams, where the two differ."""
        own = type(self).model_fields
        given = [name for name in RENAMED if name in own and getattr(self, name) is not None]
        names = {RENAMED[name]: name for name in given}
        return names | ({"logprobs": "top_logprobs"} if "top_logprobs" in own else {})

    def form(self) -> tuple[Any, str]:
        """(The form of the answer as the API writes it, the name of its field)."""
        return None, ""


async def sampling_params(serving: Serving, body: SamplingFields) -> SamplingParams:
    """SamplingParams of a request.  Raises ApiError (400) with the name, the value and the limit.

    Without max_tokens, an answer may fill the context.
    """
    facts, most, names = serving.model.facts, serving.server.config.max_logprobs, body.names()
    own = {name: value for name, value in body.sampling().items() if value is not None}
    for name, low, high in (("n", 1, MAX_N), ("logprobs", 0, most), ("prompt_logprobs", 0, most)):
        if isinstance(value := own.get(name), int) and not low <= value <= high:
            raise must_be(names.get(name, name), f"an integer from {low} to {high}", value)
    if "logit_bias" in own:
        own["logit_bias"] = by_token_id(own["logit_bias"])
    try:
        params = SamplingParams(**{**facts.sampling_defaults, "max_tokens": None, **own})
        validate(params, facts.vocab_size)
    except SamplingError as e:
        option = e.option
        message = e.spelled(lambda name: names.get(name, name))
        raise ApiError(400, message, param=option and names.get(option, option)) from None
    return await with_form(params, *body.form())
