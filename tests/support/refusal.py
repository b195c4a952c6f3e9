"""Bad values, and the error that refuses them."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_metal_lite.errors import MetalLiteError


class Broken:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError


def refusal(
    call: Callable, *args: Any, error: type[MetalLiteError] = MetalLiteError, **kwargs: Any
) -> str:
    """The message of the project's own error, which is one printable line."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.isprintable()
    assert 0 < len(message) < 600
    return message
