"""`/`: the page, a chat beside a live view of the engine.  Its files lie in the folder `page`.

The page itself holds no secret, so no API key guards it; its requests to the API carry the key.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_metal_lite.server.errors import ApiError, error_response, openai_shape
from vllm_metal_lite.server.server import Server

FOLDER = Path(__file__).with_name("page")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
# Answers of a model are shown as HTML: nothing outside of the page's own files may run or load.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
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


class _File:
    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        etag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'
        self.headers = {**_HEADERS, "ETag": etag, "Content-Type": _TYPES[path.suffix]}

    def response(self, request: Request) -> Response:
        if self.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def routes(server: Server) -> list[Route]:
    """`/` and `/page/...`.  The files are read once; no other path of the disk can be reached."""
    files = {
        path.relative_to(FOLDER).as_posix(): _File(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return error_response(ApiError(404, f"no file {name!r}"), openai_shape)
        return files[name].response(request)

    return [Route(path, page, include_in_schema=False) for path in ("/", "/page/{name:path}")]
