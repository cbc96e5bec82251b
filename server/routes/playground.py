"""`GET /` and `GET /assets/…`: a static page that loads nothing from other origins."""

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
"""Content types of served files; other files are not served."""

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
"""Headers of every file. Caches must revalidate, since another version of the server may have changed it."""

router = APIRouter()


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{sha256(self.body).hexdigest()[:32]}"'

    def response(self, known: str) -> Response:
        """The file; 304 if its tag is in `known`, the tags that the client has."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in known or known.strip() == "*":
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.media_type})


def read_assets() -> Iterator[tuple[str, Asset]]:
    """Every served file by name."""
    for file in FOLDER.iterdir():
        if media_type := MEDIA_TYPES.get(file.suffix):
            yield file.name, Asset(file.read_bytes(), media_type)


ASSETS = dict(read_assets())


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    return served(request, INDEX)


@router.api_route("/assets/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    return served(request, name)


def served(request: Request, name: str) -> Response:
    if name not in ASSETS:
        raise HTTPException(404)
    return ASSETS[name].response(request.headers.get("if-none-match", ""))
