"""Logging of this package under vLLM."""

import logging


class _Forward(logging.Handler):
    """Forwards records to another logger, using its handlers at that moment."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        self.target.handle(record)


def log_through_vllm() -> None:
    """Send our records to vLLM's handlers, so that the user configures only vLLM's logging."""
    ours = logging.getLogger("vllm_metal_lite")
    if not any(isinstance(handler, _Forward) for handler in ours.handlers):
        ours.addHandler(_Forward(logging.getLogger("vllm.metal_lite")))
        ours.propagate = False  # vLLM's logger decides on propagation
        # vLLM's handlers decide on levels; at the first start INFO tells of the checks.
        ours.setLevel(logging.INFO)
