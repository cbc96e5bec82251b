"""JSON bodies; rejects by name what Python's parser would accept beyond the standard."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.errors import ApiError


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


class JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """Raises `json.JSONDecodeError`, or `ApiError` for bytes that are no text, too much depth and a key twice."""
    encoding = json.detect_encoding(body)
    try:
        return json.loads(body.decode(encoding), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid {encoding.upper()}: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error


def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys, of which a proxy may have read the other value."""
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in made if names.count(name) > 1)
        raise ApiError(f"the body has {twice[:100]!r} twice in one object", param=twice[:100])
    return made
