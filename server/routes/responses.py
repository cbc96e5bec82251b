"""`POST /v1/responses`: a chat in another form, whose responses can be continued by id for a while."""

import json
from collections import OrderedDict
from functools import partial
from threading import Lock

from fastapi import APIRouter, Request
from starlette.responses import Response as HttpResponse

from server.errors import ApiError
from server.generation.chat import start_chat
from server.routes.json_route import JsonRoute
from server.schemas.responses import Json, Response, ResponseRequest, added
from server.writers.answer import answer, opened
from server.writers.response_writer import ResponseWriter

MAX_KEPT = 10_000
MAX_KEPT_CHARACTERS = 64_000_000

router = APIRouter(route_class=JsonRoute)


class KeptResponses:
    """The conversations of the latest responses, by the id of the API key and of the response.

    Kept in this process's memory: each replica has its own, and a restart loses them.
    """

    def __init__(self) -> None:
        self._conversations: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._num_characters = 0
        self._lock = Lock()  # long answers are written by other threads than short ones

    def find(self, owner: str, response_id: str) -> list[Json]:
        """Raises `ApiError` for one that is not kept, or belongs to another key."""
        with self._lock:
            text = self._conversations.get((owner, response_id))
            if text is not None:
                self._conversations.move_to_end((owner, response_id))
        if text is None:
            message = f"there is no response {response_id[:100]!r}, or it is no longer kept"
            raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
        messages: list[Json] = json.loads(text)
        return messages

    def keep(self, owner: str, messages: list[Json], response: Response) -> None:
        """A response of the same id, which clients may give (`x-request-id`), is replaced."""
        said = list(messages)
        for item in response["output"]:
            said = added(said, item, "output")
        key, text = (owner, response["id"]), json.dumps(said)
        with self._lock:
            self._num_characters += len(text) - len(self._conversations.pop(key, ""))
            self._conversations[key] = text
            while len(self._conversations) > MAX_KEPT or self._num_characters > MAX_KEPT_CHARACTERS:
                self._num_characters -= len(self._conversations.popitem(last=False)[1])


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> HttpResponse:
    kept: KeptResponses = request.app.state.kept_responses
    owner = request.state.key_id
    earlier = kept.find(owner, body.previous_response_id) if body.previous_response_id else []
    chat = body.as_chat(earlier)
    service, record = opened(request, chat)
    generated = await start_chat(service, chat, record, owner)
    keep = partial(kept.keep, owner, [*earlier, *body.messages()]) if body.store else lambda _: None
    writer = ResponseWriter(service, body, chat, generated, f"resp_{record.request_id}", keep)
    return await answer(request, body, writer)
