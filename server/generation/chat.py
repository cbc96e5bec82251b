"""From a checked chat to its running choices, whichever endpoint it came by."""

from server.generation.choice_text import CallText
from server.generation.generation import Generation, start
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.formats import Form
from server.telemetry.record import RequestRecord


async def start_chat(service: Service, chat: ChatRequest, record: RequestRecord, tenant: str) -> Generation:
    """Admit, make the prompt and submit. Raises what refuses the request, and leaves nothing behind then."""
    template = service.chat_template
    with service.admission.entered(chat.num_choices, tenant), chat.in_own_names():
        kept = chat.num_prompt_tokens_kept(service.engine.context, chat.asked_max_tokens)
        prompt = await service.read_messages(chat.conversation(), kept)
        form = await service.begun(chat.form(template.call_format, template.call_tokens), chat.continued)
        constraint = await service.constraint(form, chat.allowed_token_ids)
        max_tokens = service.default_max_tokens(len(prompt.token_ids), chat.num_choices)
        params = chat.params(constraint, max_tokens, template.stop_token_ids)
        ends_turn = (form is None or form.is_text) and not chat.ignore_eos
        stops = template.stops if ends_turn else ()
        calls = call_text(service, chat, form)
        return start(service, chat, params, [prompt], record, tenant=tenant, stops=stops, calls=calls)


def call_text(service: Service, chat: ChatRequest, form: Form | None) -> CallText:
    """How calls stand in the text of an answer in this form."""
    template = service.chat_template
    if not chat.callable_tools():
        return CallText(chat.continued)
    shown = template.call_format.tokens if template.call_format else ()
    return CallText(
        chat.continued,
        has_begun=form is not None and bool(form.begun),
        shown={template.call_tokens[text]: text for text in shown if text in template.call_tokens},
        ends_at_repeated=template.call_format if chat.ends_at_repeated_calls else None,
    )
