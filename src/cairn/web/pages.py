"""The files of the dashboard.

They are held in memory: Starlette's StaticFiles needs a thread for each, and while state is read
all threads may be busy.

Always true here:
- every file comes from the wheel, and none contains facts of a job;
- only files that are in the folder when the server starts are served, by their exact names.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cairn.web.errors import ApiError
from cairn.web.site import Site

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


def _load() -> dict[str, _File]:
    found = {}
    for entry in files("cairn.web").joinpath("static").iterdir():
        kind = entry.name.rpartition(".")[2]
        if entry.is_file() and kind in _TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[entry.name] = _File(content, _TYPES[kind], tag)
    return found


def routes(site: Site) -> list[Route]:
    known = _load()

    def answer(request: Request, name: str) -> Response:
        file = known.get(name)
        if file is None:
            raise ApiError(404, "not-found", "File not found", "the dashboard is at /")
        # A browser asks again each time, and gets an empty answer while the file is the same.
        headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    async def static(request: Request) -> Response:
        return answer(request, request.path_params["name"])

    return [Route("/", page), Route("/static/{name}", static)]
