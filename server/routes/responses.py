"""`/v1/responses`: a chat in another form, whose responses can be continued, read and deleted by id for a while."""

import json
from collections import OrderedDict, defaultdict
from threading import Lock
from typing import NamedTuple

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response as HttpResponse

from server.errors import ApiError
from server.generation.chat import start_chat
from server.routes.json_route import JsonRoute
from server.schemas.responses import DeletedResponse, Json, Response, ResponseRequest, with_item
from server.writers.answer import answer, opened
from server.writers.response_writer import ResponseWriter

MAX_KEPT = 10_000
MAX_KEPT_CHARACTERS = 64_000_000

router = APIRouter(route_class=JsonRoute)


class Kept(NamedTuple):
    response: str
    conversation: str

    @property
    def num_characters(self) -> int:
        return len(self.response) + len(self.conversation)


class KeptResponses:
    """The latest responses, by the id of the API key and of the response.

    When they are too many or too long, the key that has the most loses its oldest. Kept in this process's memory: each
    replica has its own, and a restart loses them.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[str, OrderedDict[str, Kept]] = defaultdict(OrderedDict)
        self._sizes: defaultdict[str, int] = defaultdict(int)
        self._lock = Lock()  # long answers are written by other threads than short ones

    def find(self, owner: str, response_id: str) -> Kept | None:
        with self._lock:
            kept = self._kept[owner].get(response_id)
            if kept:
                self._kept[owner].move_to_end(response_id)
            return kept

    def keep(self, owner: str, messages: list[Json], response: Response) -> None:
        """A response of the same id, which clients may give (`x-request-id`), is replaced."""
        said = list(messages)
        for item in response["output"]:
            said = with_item(said, item, "output")
        kept = Kept(to_json(response).decode(), json.dumps(said))
        with self._lock:
            self._drop(owner, response["id"])
            self._kept[owner][response["id"]] = kept
            self._sizes[owner] += kept.num_characters
            while sum(self._sizes.values()) > MAX_KEPT_CHARACTERS or sum(map(len, self._kept.values())) > MAX_KEPT:
                greedy = max(self._kept, key=lambda key: (self._sizes[key], len(self._kept[key])))
                self._drop(greedy, next(iter(self._kept[greedy])))

    def delete(self, owner: str, response_id: str) -> None:
        with self._lock:
            self._drop(owner, response_id)

    def _drop(self, owner: str, response_id: str) -> None:
        if dropped := self._kept[owner].pop(response_id, None):
            self._sizes[owner] -= dropped.num_characters


def earlier(kept: KeptResponses, owner: str, response_id: str | None) -> list[Json]:
    """The conversation that a response ends. Raises `ApiError` for one that is not kept, or of another key."""
    if response_id is None:
        return []
    if (found := kept.find(owner, response_id)) is None:
        message = f"there is no response {response_id[:100]!r}, or it is no longer kept"
        raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
    messages: list[Json] = json.loads(found.conversation)
    return messages


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> HttpResponse:
    kept: KeptResponses = request.app.state.kept_responses
    owner = request.state.key_id
    before = earlier(kept, owner, body.previous_response_id)
    chat = body.as_chat(before)
    service, record = opened(request, chat)
    generated = await start_chat(service, chat, record, owner)
    said = [*before, *body.messages()]

    def keep(response: Response) -> None:
        if body.store:
            kept.keep(owner, said, response)

    writer = ResponseWriter(service, body, chat, generated, f"resp_{record.request_id}", keep)
    return await answer(request, body, writer)


@router.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"])
async def stored_response(response_id: str, request: Request) -> HttpResponse:
    """One route, as the `allow` header of a 405 names the methods of one."""
    kept, owner = request.app.state.kept_responses, request.state.key_id
    found: Kept | None = kept.find(owner, response_id)
    if found is None:
        error = ApiError(f"there is no response {response_id[:100]!r}, or it is no longer kept", param="response_id")
        error.status = 404
        raise error
    if request.method == "GET":
        return HttpResponse(found.response, media_type="application/json")
    kept.delete(owner, response_id)
    deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return HttpResponse(to_json(deleted), media_type="application/json")
