"""`GET /` and `GET /assets/…`: one static page, for which nothing is loaded from elsewhere and nothing is computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent.parent / "playground"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Of the files that are served; a file of any other kind is not."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""Of every file. It may be kept, but whoever keeps it asks whether it is still the same, as a new server may differ."""

router = APIRouter()


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{sha256(self.body).hexdigest()[:32]}"'

    def response(self, known: str) -> Response:
        """The file, or that it is one of those that the client knows, a list of tags."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in known or known.strip() == "*":
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.media_type})


def read_assets() -> Iterator[tuple[str, Asset]]:
    """Every file of the page by its name."""
    for file in FOLDER.iterdir():
        if media_type := MEDIA_TYPES.get(file.suffix):
            yield file.name, Asset(file.read_bytes(), media_type)


ASSETS = dict(read_assets())


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    return answer(request, INDEX)


@router.api_route("/assets/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    return answer(request, name)


def answer(request: Request, name: str) -> Response:
    if name not in ASSETS:
        raise HTTPException(404)
    return ASSETS[name].response(request.headers.get("if-none-match", ""))
