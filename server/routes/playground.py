"""`GET /` and `GET /assets/…`: the playground, a static page that loads nothing from other origins."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent.parent / "playground"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}
"""Headers of every file. Caches must revalidate, because another version of the server may have changed the file."""

router = APIRouter()
FILES = StaticFiles(directory=FOLDER, follow_symlink=True)


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return await asset(request, "index.html")


@router.get("/assets/{name}", include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    response = await FILES.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response
