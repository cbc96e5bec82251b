"""`POST /v1/completions` and `/v1/chat/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation.generation import start, start_chat
from server.http.bodies import JsonRoute
from server.schemas.chat import Chat, ChatRequest
from server.schemas.completions import Completion, CompletionRequest
from server.writers.chunk_writers import ChatWriter, CompletionWriter
from server.writers.writer import accepted, answer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", summary="Continue prompts", response_model=Completion)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service, record = accepted(request, body)
    num_choices = len(body.prompts) * body.num_choices
    with service.admission.entered(num_choices), body.in_request_names():
        output_format = body.output_format()
        async with service.within_deadline(record.arrived_at):
            prompts = await service.tokenize_prompts(body.prompts, adds_special_tokens=body.add_special_tokens)
            compiled = await service.constraint(output_format)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        max_tokens = service.max_tokens(body.requested_max_tokens, longest, num_choices, body.logprobs)
        params = body.params(compiled.constraint, max_tokens, service.sampling_defaults)
        generated = start(service, body, params, prompts, record, echo=body.echo, ignored=compiled.ignored)
    writer = CompletionWriter(service, body, generated, f"cmpl-{record.request_id}")
    return await answer(request, body, writer)


@router.post("/v1/chat/completions", summary="Answer messages", response_model=Chat)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service, record = accepted(request, body)
    generated = await start_chat(service, body, record)
    writer = ChatWriter(service, body, generated, f"chatcmpl-{record.request_id}")
    return await answer(request, body, writer)
