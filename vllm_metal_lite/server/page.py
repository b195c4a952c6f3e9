"""`/`: the page, a chat beside a live view of the engine.  Its files lie in the folder `page`.

The page itself holds no secret, so no API key guards it; its requests to the API carry the key.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).with_name("page")

# Answers of a model are shown as HTML: nothing outside of the page's own files may run or load.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers keep a file, and ask by its ETag whether it changed
}


class _Files(StaticFiles):
    """Files of the folder only, with our headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


_FILES = _Files(directory=FOLDER)


async def _page(request: Request) -> Response:
    return await _FILES.get_response("index.html", request.scope)


ROUTES = (Route("/", _page), Mount("/page", _FILES))
