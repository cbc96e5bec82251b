"""`POST /v1/chat/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation.generation import start_chat
from server.http.bodies import JsonRoute
from server.schemas.chat import Chat, ChatRequest
from server.writers.answer import accepted, answer
from server.writers.chat_writer import ChatWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer messages", response_model=Chat)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service, record = accepted(request, body)
    generated = await start_chat(service, body, record, request.state.key_id)
    writer = ChatWriter(service, body, generated, f"chatcmpl-{record.request_id}")
    return await answer(request, body, writer)
