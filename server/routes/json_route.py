"""JSON bodies. Rejects duplicate keys, which Python's parser accepts."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.errors import ApiError


class JsonRoute(APIRoute):
    """A route whose body is parsed by `parsed`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


class JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """Parse JSON. Raise `json.JSONDecodeError`, or `ApiError` for bad encoding, deep nesting or duplicate keys."""
    encoding = json.detect_encoding(body)
    try:
        return json.loads(body.decode(encoding), object_pairs_hook=without_duplicates)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid {encoding.upper()}: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ApiError("the body is nested too deeply") from error


def without_duplicates(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise `ApiError` for a duplicate key. A proxy may have checked one value, and this server would use another."""
    made = dict(members)
    if len(made) < len(members):
        names = [name for name, _ in members]
        duplicate = next(name for name in made if names.count(name) > 1)
        raise ApiError(f"the body has a duplicate key {duplicate[:100]!r}", param=duplicate[:100])
    return made
