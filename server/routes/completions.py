"""`POST /v1/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation.generation import start
from server.routes.json_route import JsonRoute
from server.schemas.completions import CompletionRequest
from server.writers.answer import answer, opened
from server.writers.completion_writer import CompletionWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service, record = opened(request, body)
    tenant = request.state.key_id
    with service.admission.entered(len(body.prompts) * body.num_choices, tenant):
        kept = body.num_prompt_tokens_kept(service.engine.context, body.max_tokens)
        prompts = await service.read_prompts(body.prompts, kept)
        params = body.params(await service.constraint(body.form(), body.allowed_token_ids))
        generated = start(service, body, params, prompts, record, tenant=tenant, echo=body.echo)
    writer = CompletionWriter(service, body, generated, f"cmpl-{record.request_id}")
    return await answer(request, body, writer)
