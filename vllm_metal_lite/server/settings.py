"""Every option of the server, validated when it is made."""

import ipaddress
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from vllm_metal_lite.errors import ConfigError, Option, show
from vllm_metal_lite.rules import Flag, apply_rules, integer, number

_NAME = re.compile(r"[^\s/:@\[\]]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+")


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server; `ConfigError` names the value and the limit if one is out of range.

    The flags say what each option does, and docs/configuration.md says more.

    api_key: if None, requests need no key, and the host must be a loopback address.
    allowed_hosts: names that the Host header may have, besides the address itself; "*" allows any
    name, and requests without the header.
    allowed_media_domains: hosts that pictures by http URL may come from; "*" allows any.
    allowed_origins: origins of web pages that may call the server (CORS); "*" allows any.
    memory_budget_gib: the memory for all models together; if None, a safe value for the device.
    """

    host: Annotated[
        str, Flag("ADDRESS", "address to listen on; any address but loopback needs an API key")
    ] = "127.0.0.1"
    port: Annotated[int, integer(0, 65535), Flag("N", "port to listen on; 0: any free port")] = 8000
    api_key: Annotated[
        str | None,
        Flag("KEY", "key that requests must send (default: METAL_LITE_API_KEY, or none)"),
    ] = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    max_body_mib: Annotated[float, number(0, above=True), Flag("N", "largest request in MiB")] = 32
    max_waiting: Annotated[
        int, integer(0), Flag("N", "requests that may wait for a seat; more get 503")
    ] = 256
    max_logprobs: Annotated[
        int, integer(0), Flag("N", "log-probabilities a token that a request may ask for")
    ] = 20
    drain: Annotated[
        float, number(0), Flag("S", "seconds that running requests may take when the server stops")
    ] = 10
    keep_alive: Annotated[
        float,
        number(0, above=True),
        Flag("S", "seconds without a token, after which a stream gets a keep-alive event"),
    ] = 5
    idle_unload: Annotated[
        float | None,
        number(0, above=True),
        Flag("MINUTES", "unload a model after so long without requests (default: never)"),
    ] = None
    memory_budget_gib: Annotated[
        float | None,
        number(0, above=True),
        Flag("N", "GiB for all models together (default: a safe value)"),
    ] = None

    def __post_init__(self) -> None:
        apply_rules(self, ConfigError)
        # Clients encode other characters each in its own way.
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise ConfigError(Option("api_key"), " must be ASCII, without spaces, and not empty")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    Option("allowed_origins"),
                    f" must be as browsers send them, such as https://example.com, or *, got "
                    f"{show(origin)}",
                )
        for option in "allowed_hosts", "allowed_media_domains":
            for name in getattr(self, option):
                if not _NAME.fullmatch(name):
                    why = f" must be names without a port, such as example.com, got {show(name)}"
                    raise ConfigError(Option(option), why)
        ip = ip_address_of(self.host)
        is_loopback = self.host == "localhost" if ip is None else ip.is_loopback
        if self.api_key is None and not is_loopback:
            raise ConfigError(
                Option("host"),
                f" {show(self.host)} can be reached from other machines: set an ",
                Option("api_key"),
            )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)


def ip_address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that `host` is; None if it is a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None
