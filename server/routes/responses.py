"""`/v1/responses`: chats in OpenAI's Responses form. Recent responses can be continued, read and deleted by id."""

import json
from collections import OrderedDict, defaultdict
from threading import Lock
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from pydantic_core import to_json
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response as HttpResponse

from server.errors import UNSUPPORTED, ApiError
from server.generation.generation import start_chat
from server.generation.service import Service
from server.http.bodies import JsonRoute
from server.http.event_stream import DONE, EventStream, framed
from server.routes.tokens import computed
from server.schemas.body import require
from server.schemas.response_items import Json, listed
from server.schemas.responses import DeletedResponse, InputItems, InputTokens, Response, ResponseRequest
from server.writers.response_writer import ResponseWriter, replayed
from server.writers.writer import accepted, answer, ignored_params, json_response

MAX_STORED = 10_000
MAX_STORED_CHARACTERS = 64_000_000

router = APIRouter(route_class=JsonRoute)


class StoredResponse(NamedTuple):
    response: str
    items: str
    """The input and output items of this response and the earlier ones, as JSON."""
    num_inputs: int
    """Number of items before the output of this response."""

    @property
    def num_characters(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Recent responses by API key id and response id, in this process's memory.

    If a limit, `MAX_STORED` or `MAX_STORED_CHARACTERS`, is exceeded, the key with the most characters loses its least
    recently used response. Replicas do not share responses, and a restart loses them.
    """

    def __init__(self) -> None:
        self._owned: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        self._sizes: defaultdict[str, int] = defaultdict(int)
        self._lock = Lock()  # long responses are stored from other threads

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            found = self._owned[owner].get(response_id)
            if found:
                self._owned[owner].move_to_end(response_id)
            return found

    def store(self, owner: str, inputs: list[Json], response: Response) -> None:
        """Store a response and its input items. A response with the same id (`x-request-id`) is replaced."""
        items = json.dumps([*inputs, *response["output"]])
        stored = StoredResponse(to_json(response).decode(), items, len(inputs))
        with self._lock:
            self._drop(owner, response["id"])
            self._owned[owner][response["id"]] = stored
            self._sizes[owner] += stored.num_characters
            while sum(self._sizes.values()) > MAX_STORED_CHARACTERS or sum(map(len, self._owned.values())) > MAX_STORED:
                largest = max(self._owned, key=lambda key: (self._sizes[key], len(self._owned[key])))
                self._drop(largest, next(iter(self._owned[largest])))

    def delete(self, owner: str, response_id: str) -> None:
        with self._lock:
            self._drop(owner, response_id)

    def _drop(self, owner: str, response_id: str) -> None:
        if dropped := self._owned[owner].pop(response_id, None):
            self._sizes[owner] -= dropped.num_characters


def found(request: Request, response_id: str, **error: Any) -> StoredResponse:
    """Return a response of the request's key. Raise `ApiError` with the fields `error` if it is not stored."""
    store: ResponseStore = request.app.state.response_store
    if stored := store.find(request.state.record.key_id, response_id):
        return stored
    raise ApiError(f"response {response_id[:100]!r} does not exist or is no longer stored", **error)


def earlier(request: Request, response_id: str | None) -> list[Json]:
    """Return the items up to a response. Raise `ApiError` if the key has no such response."""
    if response_id is None:
        return []
    stored = found(request, response_id, param="previous_response_id", code="previous_response_not_found")
    items: list[Json] = json.loads(stored.items)
    return items


@router.post("/v1/responses", summary="Generate a response (OpenAI's Responses API)", response_model=Response)
async def create_response(body: ResponseRequest, request: Request) -> HttpResponse:
    store: ResponseStore = request.app.state.response_store
    before = earlier(request, body.previous_response_id)
    chat = body.as_chat(before)
    service, record = accepted(request, chat)
    generated = await start_chat(service, chat, record, truncates=body.truncation == "auto")

    def keep(response: Response) -> None:
        if body.store:
            store.store(record.key_id, [*before, *map(listed, body.items)], response)

    writer = ResponseWriter(service, body, chat, generated, f"resp_{record.request_id}", keep)
    return await answer(request, body, writer)


@router.post("/v1/responses/input_tokens", summary="Count the tokens of a request's input", response_model=InputTokens)
async def count_input_tokens(body: ResponseRequest, request: Request) -> HttpResponse:
    service: Service = request.app.state.service
    service.checked_model(body.model)
    chat = body.as_chat(earlier(request, body.previous_response_id))

    def count() -> HttpResponse:
        with chat.in_request_names():
            number = len(service.chat_prompt(chat, truncates=body.truncation == "auto"))
        counted: InputTokens = {"object": "response.input_tokens", "input_tokens": number}
        return json_response(counted, ignored_params(body, chat.ineffective(service.chat_template)))

    return await computed(request, count)


class ResponseId(StringConvertor):
    """A path segment that may be a response's id. Others, such as `compact`, are other endpoints of OpenAI's."""

    regex = r"resp_[^/]+"


register_url_convertor("response_id", ResponseId())


@router.api_route(
    "/v1/responses/{response_id:response_id}",
    methods=["GET", "DELETE"],  # in one route, so that the `allow` header of a 405 lists both
    summary="Get or delete a stored response",
    response_model=Response | DeletedResponse,
)
async def stored_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=0)] | None = None
) -> HttpResponse:
    """Return a stored response or, with `stream`, its events after number `starting_after`."""
    kept = stored(request, response_id)
    require(stream or starting_after is None, "starting_after", "only allowed when stream is true")
    if request.method == "DELETE":
        request.app.state.response_store.delete(request.state.record.key_id, response_id)
        deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return json_response(deleted)
    if not stream:
        return HttpResponse(kept.response, media_type="application/json")

    def replay() -> HttpResponse:
        first = 0 if starting_after is None else starting_after + 1
        events = [*replayed(json.loads(kept.response))[first:], DONE]
        return HttpResponse(framed(events), media_type=EventStream.media_type)

    return await computed(request, replay)


@router.get(
    "/v1/responses/{response_id:response_id}/input_items",
    summary="List the input items of a stored response",
    response_model=InputItems,
)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> HttpResponse:
    kept = stored(request, response_id)
    items: list[Json] = json.loads(kept.items)[: kept.num_inputs][:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    require(after is None or after in ids, "after", "must be the id of an input item")
    first = 0 if after is None else len(ids) - ids[::-1].index(after)  # clients may repeat ids
    page, ids = items[first : first + limit], ids[first : first + limit]
    listing: InputItems = {
        "object": "list",
        "data": page,
        "first_id": next(iter(ids), None),
        "last_id": next(reversed(ids), None),
        "has_more": first + limit < len(items),
    }
    return json_response(listing)


def stored(request: Request, response_id: str) -> StoredResponse:
    """Return a response of the request's key. Raise `ApiError` if it is not stored, or for an unsupported parameter."""
    for name in ("include", "include[]", "include_obfuscation"):  # OpenAI's, which would change what is returned
        require(request.query_params.get(name, "false") == "false", name, "not supported", code=UNSUPPORTED)
    return found(request, response_id, status=404, param="response_id", code="response_not_found")
