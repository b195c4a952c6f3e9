"""How one request wants its tokens chosen, named as vLLM names it."""

from dataclasses import dataclass, field
from math import isfinite

from vllm_metal_lite.errors import SamplingError


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise SamplingError(f"{name} must be {limit}, got {value!r}")


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < 2**1024 and isfinite(value)  # isfinite cannot take an int beyond a float


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; validated when made, `SamplingError` if out of range.

    temperature 0 is greedy.  top_k 0 or -1 keeps every token.  max_tokens None means "up to the
    context length".  seed makes the request's tokens independent of whatever else is in the batch.
    logprobs / prompt_logprobs: how many of the most likely tokens to report at each position
    (0: only the chosen one); they are taken from the model's raw logits, as in vLLM.
    allowed_token_ids: nothing else is sampled.  bad_words: strings that are never completed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    # `stop` as a tuple, whatever form it was given in.
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    MAX_N = 1024

    def __post_init__(self) -> None:
        number = {
            "temperature": (0.0, None),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in number.items():
            value = getattr(self, name)
            ok = _is_number(value) and value >= low and (high is None or value <= high)
            _require(
                ok, name, value, f"a number >= {low}" if high is None else f"in [{low}, {high}]"
            )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(
            _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "a number > 0",
        )  # fmt: skip
        _require(
            _is_int(self.n) and 1 <= self.n <= self.MAX_N, "n", self.n, f"in [1, {self.MAX_N}]"
        )
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1, 0 or positive")
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens", self.max_tokens, "at least 1 (or None)",
        )  # fmt: skip
        _require(
            _is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, ">= 0"
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed", self.seed, "an integer of 64 bits (or None)",
        )  # fmt: skip
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or (_is_int(value) and value >= 0),
                name, value, "0 or positive (or None)",
            )  # fmt: skip
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        _require(
            isinstance(stop, (list, tuple)) and all(isinstance(s, str) and s for s in stop),
            "stop", self.stop, "a non-empty string, or a list of them",
        )  # fmt: skip
        words = () if self.bad_words is None else self.bad_words
        _require(
            isinstance(words, (list, tuple)) and all(isinstance(w, str) and w for w in words),
            "bad_words", self.bad_words, "a list of non-empty strings",
        )  # fmt: skip
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            _require(
                ids is None
                or (isinstance(ids, (list, tuple)) and all(_is_int(t) and t >= 0 for t in ids)),
                name, ids, "a list of token ids >= 0",
            )  # fmt: skip
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids", self.allowed_token_ids, "None or hold at least one token id",
        )  # fmt: skip
        bias = self.logit_bias or {}
        _require(
            isinstance(bias, dict)
            and all(_is_int(t) and t >= 0 and _is_number(b) for t, b in bias.items()),
            "logit_bias", self.logit_bias, "a dict of token id >= 0 to finite number",
        )  # fmt: skip
        object.__setattr__(self, "stop_strings", tuple(stop))

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5
