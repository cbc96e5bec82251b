"""`GET /` and `GET /assets/…`: the playground, a static page that loads nothing from other origins."""

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
"""Content types by suffix. Files with other suffixes are not served."""

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
"""Headers of every file. Caches must revalidate, because another version of the server may have changed the file."""

router = APIRouter()


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{sha256(self.body).hexdigest()[:32]}"'

    def response(self, if_none_match: str) -> Response:
        """Return the file, or 304 if the client has it."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in if_none_match or if_none_match.strip() == "*":
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.media_type})


ASSETS = {
    file.name: Asset(file.read_bytes(), MEDIA_TYPES[file.suffix])
    for file in FOLDER.iterdir()
    if file.suffix in MEDIA_TYPES
}


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
