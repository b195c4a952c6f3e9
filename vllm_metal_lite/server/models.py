"""The models that a server has, by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.worker.client import EngineClient


@dataclass(frozen=True)
class ModelSpec:
    """name: what requests call the model.  source: "demo", a folder or a Hugging Face name."""

    name: str
    source: str
    pinned: bool = False


class Models:
    """Loads models and hands out their engines.  Use from one event loop."""

    def __init__(self, specs: list[ModelSpec], config: EngineConfig) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.config = config
        self.loaded: dict[str, EngineClient] = {}

    async def start(self) -> None:
        """Load the models that are loaded from the start.  Raises ModelLoadError."""
        for spec in self.specs.values():
            self.loaded[spec.name] = await EngineClient.start(spec.source, self.config)

    async def stop(self) -> None:
        """End all engines."""
        for client in self.loaded.values():
            await client.stop()

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[ModelSpec, EngineClient]]:
        """The engine of a model, loaded; the model stays loaded inside of the block.

        name None or "": the first model.  Raises ApiError (404) for a name that nobody knows.
        """
        name = name or next(iter(self.specs))
        if name not in self.specs:
            known = ", ".join(self.specs)
            raise ApiError(
                404, f"The model `{name}` does not exist; there is: {known}.",
                param="model", code="model_not_found",
            )  # fmt: skip
        yield self.specs[name], self.loaded[name]
