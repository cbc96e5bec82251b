"""`POST /v1/chat/completions`: messages to a prompt, admit, and answer whole or as a stream."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation.generation import start
from server.schemas.chat import ChatRequest
from server.writers.answer import answer, opened
from server.writers.chat_writer import ChatWriter

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service, record = opened(request, body)
    template = service.chat_template
    with service.admission.entered(body.num_choices), body.in_own_names():
        prompt = await service.read_messages(body.conversation(), body.truncate_prompt_tokens)
        form = body.form(template.call_format, template.call_marker_id)
        constraint = await service.constraint(form, body.allowed_token_ids)
        room = service.room(len(prompt.token_ids), body.num_choices)
        is_text = form is None or form.is_text
        stops = template.stops if is_text and not body.ignore_eos else ()
        params = body.params(constraint, room, template.stop_token_ids)
        generated = start(service, body, params, [prompt], record, tenant=request.state.key_id, stops=stops)
    writer = ChatWriter(service, body, generated, f"chatcmpl-{record.request_id}")
    return await answer(request, body, generated, writer)
