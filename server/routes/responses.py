"""`POST /v1/responses`: a chat by another name, whose answers can be continued by their id for a while."""

import json
from collections import OrderedDict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response as HttpResponse

from server.errors import ApiError
from server.generation.generation import start
from server.schemas.responses import Response, ResponseRequest, added
from server.writers.answer import answer, opened
from server.writers.response_writer import ResponseWriter

Json = dict[str, Any]

MAX_KEPT = 10_000
MAX_KEPT_CHARACTERS = 64_000_000

router = APIRouter()


class KeptResponses:
    """The conversations of the latest responses, by the key that asked and the response's id.

    In this process's memory only: a replica knows its own, and a restart forgets them.
    """

    def __init__(self) -> None:
        self._conversations: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._num_characters = 0

    def find(self, owner: str, response_id: str) -> list[Json]:
        """Raises `ApiError` for one that is not kept, or was asked for with another key."""
        if (owner, response_id) not in self._conversations:
            message = f"there is no response {response_id[:100]!r} here, or none any more"
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
    template = service.chat_template
    with service.admission.entered(1), chat.in_own_names():
        prompt = await service.read_messages(chat.conversation())
        form = chat.form(template.call_format, template.call_marker_id)
        constraint = await service.constraint(form)
        stops = template.stops if (form is None or form.is_text) and not chat.ignore_eos else ()
        params = chat.params(constraint, service.room(len(prompt.token_ids), 1), template.stop_token_ids)
        generated = start(service, chat, params, [prompt], record, tenant=owner, stops=stops)
    keep = partial(kept.keep, owner, [*earlier, *body.messages()]) if body.store else lambda _: None
    writer = ResponseWriter(service, body, chat, generated, f"resp_{record.request_id}", keep)
    return await answer(request, body, generated, writer)
