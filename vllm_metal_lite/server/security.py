"""Who may call the server, and how much they may send.

A server on loopback is within reach of every web page that the user opens, in two ways: a page may
send requests to it, and a page's own name may be made to point to it (DNS rebinding).  So requests
from other origins are refused unless allowed, and the Host header must be an address or a known
name.
"""

import asyncio
import hmac
import re
import socket
import time

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import ApiError, error_response
from vllm_metal_lite.server.settings import ServerConfig, ip_address_of

_OPEN_PATHS = ("/", "/health")  # these paths and the page's files need no key
_OPEN_FOLDER = "/page/"
# A body may take _BODY_SECONDS, and one second more for each _BODY_RATE bytes received.
_BODY_SECONDS = 30.0
_BODY_RATE = 16 * 2**10
_MAX_HEADERS = 128
_HOST = re.compile(r"(?P<name>[^\s/@\[\]:?#]+|\[[0-9a-fA-F:.]+\])(:\d*)?")  # of a Host header


def guards(config: ServerConfig) -> list[Middleware]:
    """The checks of this module, the outer ones first."""
    checks = [Middleware(_Checked, config)]
    if config.allowed_origins:
        # The first check, because a browser's preflight request has no key.  Errors of the other
        # checks then have the headers that let the page read them.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            allow_private_network=True,
        )
        checks.insert(0, cors)
    return checks


class _Checked:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._key = None if config.api_key is None else config.api_key.encode()
        own = (config.host, "localhost", socket.gethostname(), *config.allowed_hosts)
        self._names = {name.lower() for name in own}
        self._any_host = "*" in config.allowed_hosts
        self._max_body = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = _of_this_server(scope)
        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as e:
            await error_response(e, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError if the request is not to be served."""
        if len(headers) > _MAX_HEADERS:
            raise _closing(431, f"the request has {len(headers)} headers, more than {_MAX_HEADERS}")
        if "content-length" in headers and "transfer-encoding" in headers:
            # Proxies and servers disagree on where such a body ends (request smuggling).
            raise _closing(400, "send Content-Length or Transfer-Encoding, not both")
        host = headers.get("host", "")
        if not self._any_host:
            self._check_host(host)
        origins = headers.getlist("origin")
        for origin in origins:
            if not self._may_call(origin, host):
                why = f"web pages of {show(origin)} may not call this server"
                raise _refused(403, why, "--allowed-origin to allow them")
        if not origins and self._is_foreign(scope, headers):
            why = "a web page of another site sent this request without an Origin header"
            raise _refused(403, why, "--allowed-origin '*' to allow all")
        if self._key is not None and not self._is_open(scope["path"]):
            self._check_key(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._too_large()

    def _check_host(self, host: str) -> None:
        match = _HOST.fullmatch(host)
        if match is None:
            why = f"the Host header must be a name and a port, got {show(host)}"
            raise _refused(400, why, "--allowed-host '*' to accept any")
        name = match["name"].lower().removesuffix(".")
        if name not in self._names and ip_address_of(name.strip("[]")) is None:
            why = f"the Host header names {show(host)}, which is not this server"
            raise _refused(403, why, "--allowed-host to accept the name")

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a page of another site loads this URL.  Links to our page may be followed."""
        if headers.get("sec-fetch-site") != "cross-site" or "*" in self._config.allowed_origins:
            return False
        return headers.get("sec-fetch-dest") != "document" or not self._is_open(scope["path"])

    def _may_call(self, origin: str, host: str) -> bool:
        allowed = self._config.allowed_origins
        own = (f"http://{host}", f"https://{host}") if host else ()  # https: behind a proxy
        return "*" in allowed or origin in allowed or origin in own

    def _is_open(self, path: str) -> bool:
        return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)

    def _check_key(self, headers: Headers) -> None:
        assert self._key is not None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer if kind.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(key.strip().encode(), self._key) for key in given):
            raise ApiError(
                401,
                "the API key is wrong or missing: send `Authorization: Bearer KEY` or `x-api-key`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _too_large(self) -> ApiError:
        limit = f"{self._config.max_body_mib:g} MiB"
        return ApiError(413, f"the request is larger than --max-body-mib ({limit})")

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which raises ApiError for a body that is too large or too slow."""
        size, more, began = 0, True, time.monotonic()

        async def bounded() -> Message:
            nonlocal size, more
            if not more:
                return await receive()
            deadline = began + _BODY_SECONDS + size / _BODY_RATE
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                took = f"{size} bytes in {time.monotonic() - began:.1f} seconds"
                raise _closing(408, f"the body is too slow: {took}") from None
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > self._max_body:
                raise self._too_large()
            return message

        return bounded


def _of_this_server(scope: Scope) -> Scope:
    """The scope of a request.  If its target is a whole URI, the host of the URI counts, and not
    that of the Host header (RFC 9112, 3.2.2)."""
    _, is_whole, rest = scope["path"].partition("://")
    if not is_whole or scope["path"].startswith("/"):
        return scope
    host, _, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {**scope, "path": f"/{path}", "headers": [*headers, (b"host", host.encode())]}


def _refused(status: int, why: str, option: str) -> ApiError:
    return ApiError(status, f"{why}: start the server with {option}")


def _closing(status: int, message: str) -> ApiError:
    """An error after which the connection cannot be used any more."""
    return ApiError(status, message, headers={"Connection": "close"})
