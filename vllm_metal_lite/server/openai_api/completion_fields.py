"""Fields that chat completions and completions both take."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.params import SamplingFields, Unsupported


class StreamOptions(BaseModel):
    """include_usage: a last chunk has the usage.  continuous_usage_stats: every chunk has it, as in
    vLLM."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionFields(SamplingFields):
    stream_options: StreamOptions | None = None
    n: Any = None
    max_tokens: Any = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Unsupported = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", " needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise bad("prompt_logprobs", " is not supported with stream")

    def form(self) -> tuple[Any, str]:
        return self.response_format, "response_format"
