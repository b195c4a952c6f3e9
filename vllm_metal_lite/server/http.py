"""One HTTP connection: uvicorn's protocol, with a time limit on heads and errors in the API's form.

Bodies have their limits in `security.py`, which sees requests only.
"""

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_metal_lite.server.errors import ApiError, openai_shape

# From the end of one answer to the end of the next head; idle connections end earlier.
_HEAD_SECONDS = 20.0


class HttpProtocol(H11Protocol):
    """Closes a connection whose head drips or stays away."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        """Run the timer while no request is being served."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Tell what the parser refused.  uvicorn calls this while it handles the parser's error."""
        reason = sys.exc_info()[1]
        status = getattr(reason, "error_status_hint", 400)
        error = ApiError(status, f"this is not an HTTP/1.1 request: {reason or msg}")
        body = json.dumps(openai_shape(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        head = h11.Response(
            status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()
        )
        for event in head, h11.Data(data=body), h11.EndOfMessage():
            self.transport.write(self.conn.send(event))
        self.transport.close()
