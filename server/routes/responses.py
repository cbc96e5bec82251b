"""`POST /v1/responses`: a chat in another form, whose responses can be continued by id for a while."""

import json
from collections import OrderedDict
from functools import partial

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

    def find(self, owner: str, response_id: str) -> list[Json]:
        """Raises `ApiError` for one that is not kept, or belongs to another key."""
        if (owner, response_id) not in self._conversations:
            message = f"there is no response {response_id[:100]!r}, or it is no longer kept"
            raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
        self._conversations.move_to_end((owner, response_id))
        messages: list[Json] = json.loads(self._conversations[owner, response_id])
        return messages

    def keep(self, owner: str, messages: list[Json], response: Response) -> None:
        said = list(messages)
        for item in response["output"]:
            said = added(said, item, "output")
        self._conversations[owner, response["id"]] = text = json.dumps(said)
        self._num_characters += len(text)
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
