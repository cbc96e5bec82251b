"""Unsupported fields of other servers that would change the output, with their values that have no effect.

All other unknown fields are accepted, and named in the response header `x-nvium-ignored-params`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from server.schemas.body import RequestBody, Unsupported, marks

CHANGES = ": it would change the output"
STRUCTURED = Unsupported("", [], {}, why="; use `structured_outputs`")

BY_REASON: dict[Unsupported, str] = {
    # other names of our fields
    Unsupported(why="; use `max_tokens` (in `/v1/responses`, `max_output_tokens`)"): (
        "max_new_tokens max_completion_tokens max_output_tokens n_predict"
    ),
    Unsupported([], why="; use `stop`"): "stop_sequences stop_strings stop_words",
    Unsupported(why="; use `seed`"): "random_seed sampling_seed",
    Unsupported(1, 1.0, why="; use `repetition_penalty`"): "repeat_penalty",
    Unsupported(0, why="; use `min_tokens`"): "min_new_tokens",
    Unsupported(1, why="; use `n`"): "n_cmpl",
    Unsupported(False, why="; use `include_stop_str_in_output`"): "no_stop_trim",
    Unsupported(False, why="; use `echo`"): "return_full_text",
    Unsupported(why="; use `echo` with `logprobs` in `/v1/completions`"): "prompt_logprobs",
    Unsupported(1, why="; use `/v1/completions`"): "best_of",
    Unsupported(why="; use `chat_template_kwargs`"): "thinking think",
    Unsupported(-1, why="; use `thinking_budget` in `/v1/chat/completions`"): (
        "thinking_budget thinking_token_budget thinking_budget_tokens max_thinking_tokens reasoning_budget"
    ),
    Unsupported({}, why="; put its fields at the top level"): "extra_body options",
    Unsupported(why="; cut the prompt in the client, `/tokenize` counts its tokens"): (
        "truncate_prompt_tokens prompt_truncate_len prompt_truncate_length truncate"
    ),
    STRUCTURED: "guided_json guided_regex guided_choice guided_grammar json_schema regex grammar ebnf",
    Unsupported("", why=": generated JSON has no whitespace"): "guided_whitespace_pattern",
    Unsupported("", [], {}, why=": the server has no adapters"): (
        "lora lora_request lora_path lora_id adapter_id adapter_source"
    ),
    Unsupported(0): "priority",
    # fields that would change the output, by their neutral values
    Unsupported(False, why=CHANGES): (
        "echo use_beam_search early_stopping grammar_lazy penalize_nl watermark renormalize_logits temperature_last "
        "dynamic_temperature safe_prompt enable_search web_search"
    ),
    Unsupported(True, why=CHANGES): "skip_special_tokens spaces_between_special_tokens do_sample",
    Unsupported("left", why=CHANGES): "truncation_side",
    Unsupported(0, 0.0, why=CHANGES): (
        "mirostat mirostat_mode dynatemp_range xtc_probability dry_multiplier no_repeat_ngram_size epsilon_cutoff "
        "eta_cutoff penalty_alpha diversity_penalty top_a top_h min_length max_time smoothing_factor smoothing_curve "
        "skew dynatemp_min dynatemp_max"
    ),
    Unsupported(1, 1.0, why=CHANGES): (
        "length_penalty typical_p typical tfs_z encoder_repetition_penalty num_beams num_beam_groups guidance_scale"
    ),
    Unsupported(-1, why=CHANGES): ("samplers sampler_seq repeat_last_n penalty_last_n"),
    Unsupported(0, 0.0, -1, -1.0, why=CHANGES): (
        "min_keep n_indent n_probs adaptive_target adaptive_decay top_n_sigma nsigma t_max_predict_ms"
    ),
    Unsupported("", [], {}, why=CHANGES): (
        "documents logits_processors mm_processor_kwargs media_io_kwargs vllm_xargs kv_transfer_params prompt_embeds "
        "repetition_detection chat_template structural_tag bad_words allowed_token_ids stop_regex "
        "custom_logit_processor custom_params session_params input_ids input_embeds image_data images video_data "
        "audio_data grammar_triggers input_prefix input_suffix input_extra guideline tool_prompt inputs parameters "
        "bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias force_words_ids constraints "
        "negative_prompt negative_prompt_ids forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty "
        "banned_tokens token_ban banned_strings custom_token_bans sampler_order response_schema transforms plugins "
        "safety_model prompt_mode instructions previous_response_id system input format"
    ),
}
UNSUPPORTED_FIELDS = {name: mark for mark, names in BY_REASON.items() for name in names.split()}

INSTEAD = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of chats that have another name in `/v1/responses`."""


def check_unsupported(body: RequestBody) -> None:
    """Raise `InvalidField` for an unsupported field, ours or of another server, that would have an effect."""
    body.check_neutral()
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED_FIELDS or (name.startswith("guided_") and name != "guided_decoding_backend"):
            UNSUPPORTED_FIELDS.get(name, STRUCTURED).check(name, value)


def check_elsewhere(unknown: Mapping[str, Any], other: type[RequestBody], endpoint: str) -> None:
    """Raise `InvalidField` for a field of another endpoint, unless the field has its default value."""
    for name, value in unknown.items():
        if name not in UNSUPPORTED_FIELDS and (field := other.model_fields.get(name)):
            used_as = Unsupported(*neutral(field.default), why=f"; use `{INSTEAD.get(name, endpoint)}`")
            dict(marks(other)).get(name, used_as).check(name, value)


def neutral(default: Any) -> list[Any]:
    if default in (PydanticUndefined, None):
        return []
    is_integer = isinstance(default, float) and default.is_integer()
    return [default, int(default)] if is_integer else [default]
