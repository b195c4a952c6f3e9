"""This package's log under vLLM."""

import logging


class _Forward(logging.Handler):
    """Hands records to another logger, whose handlers are looked up at each record."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        self.target.handle(record)


def log_through_vllm() -> None:
    """Send the package's records to vLLM's handlers; the user configures only vLLM's logging."""
    ours = logging.getLogger("vllm_metal_lite")
    if not any(isinstance(handler, _Forward) for handler in ours.handlers):
        ours.addHandler(_Forward(logging.getLogger("vllm.metal_lite")))
        ours.propagate = False  # vLLM's logger decides whether records go further up
