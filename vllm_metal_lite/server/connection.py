"""One HTTP connection: uvicorn's protocol, with a time limit on heads and errors in the API's form.

Bodies have their limits in `security.py`, which sees requests only.
"""

import asyncio
import sys
from contextlib import suppress
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from vllm_metal_lite.server.errors import ApiError, error_response

# The time from the connection, or from the end of an answer, to the end of the next head.
_HEAD_SECONDS = 20
_PROBE_SECONDS = 0.2


class HttpProtocol(H11Protocol):
    """Closes a connection whose head is late, with uvicorn's timer for idle connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = _HEAD_SECONDS
        end = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_HEAD_SECONDS, end)

    def data_received(self, data: bytes) -> None:
        """Take data, but do not stop the timer at the first byte, as uvicorn does."""
        self.conn.receive_data(data)
        self.handle_events()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more.  It waits for its answer, or is gone: only a write tells."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe(cycle)
        return not cycle.response_complete

    def _probe(self, cycle: RequestResponseCycle) -> None:
        """Write until the answer begins: a client that is gone resets the connection."""
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # all clients skip this
            self.loop.call_later(_PROBE_SECONDS, self._probe, cycle)

    def send_400_response(self, msg: str) -> None:
        """Answer with the parser's error, which uvicorn handles while it calls this."""
        if self.cycle is not None:  # the application answers this request no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        reason = sys.exc_info()[1]
        status = getattr(reason, "error_status_hint", 400)
        error = ApiError(status, f"this is not an HTTP/1.1 request: {reason or msg}")
        response = error_response(error, "")
        headers = [*response.raw_headers, (b"connection", b"close")]
        phrase = HTTPStatus(status).phrase.encode()
        head = h11.Response(status_code=status, headers=headers, reason=phrase)
        with suppress(h11.LocalProtocolError):  # the request has its answer
            for event in head, h11.Data(data=bytes(response.body)), h11.EndOfMessage():
                self.transport.write(self.conn.send(event))
        self.transport.close()
