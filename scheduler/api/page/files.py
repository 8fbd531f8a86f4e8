"""The page's own files, which anybody may have: they hold no one's data."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, PlainTextResponse, Response

import scheduler

FOLDER = Path(scheduler.__file__).parent / "dashboard" / "page" / "built"
"""Where `make page` puts it."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors {ancestors}"
)
"""Nothing from elsewhere, and no script or style within the page's text."""
ANCESTORS = "'self' http://localhost:* http://127.0.0.1:*"
"""Who may show the page in a frame: notebooks of the browser's own machine."""
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html; charset=utf-8"}
NOT_BUILT = (
    "The page was not built: this is an installation from sources. Run `make page` (it needs Node.js 20), or install a "
    "wheel. Everything else of the scheduler works without it.\n"
)


def file_routes() -> APIRouter:
    routes = APIRouter(tags=["page"], include_in_schema=False)

    @routes.get("/")
    def page() -> Response:
        return _file("index.html", "no-cache")

    @routes.get("/assets/{name}")
    def asset(name: str) -> Response:
        # The name carries a digest of what is in it.
        return _file(f"assets/{name}", "public, max-age=31536000, immutable")

    return routes


def _file(name: str, caching: str) -> Response:
    path = (FOLDER / name).resolve()
    headers = {
        "Content-Security-Policy": POLICY.format(ancestors=ANCESTORS),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": caching,
    }
    if not path.is_relative_to(FOLDER.resolve()) or path.suffix not in TYPES or not path.is_file():
        if name == "index.html":
            return PlainTextResponse(NOT_BUILT, 503, headers=headers)
        return PlainTextResponse("no such file\n", 404, headers=headers)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=headers)
