"""Errors a user can cause.  Each message is one line that names the value and the limit."""


class MetalLiteError(ValueError):
    """Base of every error that a user's input can cause; the CLI prints it without a traceback."""


class ConfigError(MetalLiteError):
    """An option of the engine is out of range."""


class SamplingError(MetalLiteError):
    """A sampling parameter is out of range."""


class RequestError(MetalLiteError):
    """A request that can never be served: refused when it is added, others go on."""


class ModelLoadError(MetalLiteError):
    """A model cannot be found, read, or run by this package."""


class RemoteCodeError(ModelLoadError):
    """A model needs Python code of its own, and the user has not said to run that."""


class OutOfMemoryError(MetalLiteError):
    """The model or its KV store does not fit the memory that may be used."""


def one_line(e: BaseException) -> str:
    """What an exception says, or its type if it says nothing, for a message of one line."""
    return (" ".join(str(e).split()) or type(e).__name__)[:300]
