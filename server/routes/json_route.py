"""JSON bodies, read by our own parser: FastAPI's accepts duplicate keys."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.errors import ApiError
from server.schemas.json_text import JsonError, parsed


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return parsed(await self.body())
        except JsonError as error:
            raise ApiError(f"the body {error}", param=error.param, code="invalid_json") from error
