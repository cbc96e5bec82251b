"""Starts generation for a validated chat request, for `/v1/chat/completions` and `/v1/responses`."""

from server.generation.generation import Generation, start
from server.generation.service import Service
from server.schemas.body import require
from server.schemas.chat import ChatRequest
from server.telemetry.record import RequestRecord


async def start_chat(service: Service, chat: ChatRequest, record: RequestRecord, tenant: str) -> Generation:
    """Admit the request, render its prompt and submit it to the engine. If a step raises, undo the previous steps."""
    template = service.chat_template
    with service.admission.entered(chat.num_choices, tenant), chat.in_request_names():
        output_format = chat.output_format(template.call_format, template.call_marker)
        is_text = output_format is None or output_format.is_text
        require(is_text or not chat.continued, "continue_final_message", "cannot be combined with an output format")
        async with service.within_deadline(record.arrived_at):
            prompt = await service.render_chat(chat.conversation())
            compiled = await service.constraint(output_format)
        max_tokens = service.max_tokens(chat.requested_max_tokens, len(prompt.token_ids), chat.num_choices)
        stop_token_ids, stops = template.ends(ignore_eos=chat.ignore_eos)
        params = chat.params(compiled.constraint, max_tokens, stop_token_ids)
        return start(
            service,
            chat,
            params,
            [prompt],
            record,
            tenant=tenant,
            stops=stops if is_text else (),
            ignored=compiled.ignored,
        )
