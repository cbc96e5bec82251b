"""Unsupported fields of other servers that would change the output, with their values that have no effect.

All other unknown fields are accepted, and named in the response header `x-nvium-ignored-params`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from server.schemas.body import Hint, NeutralOnly


def refused(*neutral: Any, why: str = ": it would change the output") -> NeutralOnly:
    return NeutralOnly(*neutral, why=why)


OFF, EMPTY, ZERO, ONE = refused(False), refused("", [], {}), refused(0, 0.0), refused(1, 1.0)
FORMAT = refused("", [], {}, why="; use `structured_outputs`")

FOREIGN: dict[str, NeutralOnly] = {
    # other names of our fields
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
        refused(why="; use `max_tokens` (in `/v1/responses`, `max_output_tokens`)"),
    ),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), refused([], why="; use `stop`")),
    **dict.fromkeys(("random_seed", "sampling_seed"), refused(why="; use `seed`")),
    "repeat_penalty": refused(1, 1.0, why="; use `repetition_penalty`"),
    "min_new_tokens": refused(0, why="; use `min_tokens`"),
    "n_cmpl": refused(1, why="; use `n`"),
    "no_stop_trim": refused(False, why="; use `include_stop_str_in_output`"),
    "return_full_text": refused(False, why="; use `echo`"),
    # vLLM
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping"), OFF),
    "best_of": refused(1, why="; use `/v1/completions`"),
    "guided_whitespace_pattern": refused("", why=": generated JSON has no whitespace"),
    **dict.fromkeys(("documents", "logits_processors", "mm_processor_kwargs", "media_io_kwargs", "vllm_xargs"), EMPTY),
    **dict.fromkeys(("kv_transfer_params", "prompt_embeds", "repetition_detection", "chat_template"), EMPTY),
    **dict.fromkeys(("structural_tag", "bad_words", "allowed_token_ids"), EMPTY),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), FORMAT),
    **dict.fromkeys(("json_schema", "regex", "grammar", "ebnf"), FORMAT),  # also of SGLang and llama.cpp
    "priority": NeutralOnly(0),
    "prompt_logprobs": refused(why="; use `echo` with `logprobs` in `/v1/completions`"),
    "length_penalty": ONE,
    "spaces_between_special_tokens": refused(True),
    "truncation_side": refused("left"),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"), refused(-1)),
    **dict.fromkeys(("max_thinking_tokens", "reasoning_budget"), refused(-1)),
    # LoRA, of vLLM, SGLang, llama.cpp and TGI
    **dict.fromkeys(
        ("lora", "lora_request", "lora_path", "lora_id", "adapter_id", "adapter_source"),
        refused("", [], {}, why=": the server has no adapters"),
    ),
    # SGLang
    **dict.fromkeys(("stop_regex", "custom_logit_processor", "custom_params", "session_params"), EMPTY),
    **dict.fromkeys(("input_ids", "input_embeds", "image_data", "images", "video_data", "audio_data"), EMPTY),
    # llama.cpp
    **dict.fromkeys(("samplers", "sampler_seq", "repeat_last_n"), refused(-1)),
    "penalty_last_n": refused(-1),
    **dict.fromkeys(("typical_p", "typical", "tfs_z"), ONE),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "xtc_probability", "dry_multiplier"), ZERO),
    **dict.fromkeys(
        ("min_keep", "n_indent", "n_probs", "adaptive_target", "adaptive_decay"), refused(0, 0.0, -1, -1.0)
    ),
    **dict.fromkeys(("top_n_sigma", "nsigma", "t_max_predict_ms"), refused(0, 0.0, -1, -1.0)),
    **dict.fromkeys(("grammar_lazy", "penalize_nl"), OFF),
    **dict.fromkeys(("grammar_triggers", "input_prefix", "input_suffix", "input_extra"), EMPTY),
    # TGI
    **dict.fromkeys(("watermark",), OFF),
    **dict.fromkeys(("guideline", "tool_prompt", "inputs", "parameters"), EMPTY),
    # Transformers
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), EMPTY),
    **dict.fromkeys(("force_words_ids", "constraints", "negative_prompt", "negative_prompt_ids"), EMPTY),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), EMPTY),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), ZERO),
    **dict.fromkeys(("diversity_penalty", "top_a", "top_h", "min_length", "max_time"), ZERO),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beams", "num_beam_groups", "guidance_scale"), ONE),
    "do_sample": refused(True),
    "renormalize_logits": OFF,
    # Aphrodite, text-generation-webui, KoboldAI
    **dict.fromkeys(("smoothing_factor", "smoothing_curve", "skew", "dynatemp_min", "dynatemp_max"), ZERO),
    **dict.fromkeys(("temperature_last", "dynamic_temperature"), OFF),
    **dict.fromkeys(("banned_tokens", "token_ban", "banned_strings", "custom_token_bans", "sampler_order"), EMPTY),
    # hosted services
    **dict.fromkeys(("safe_prompt", "enable_search", "web_search"), OFF),
    **dict.fromkeys(("response_schema", "transforms", "plugins", "safety_model", "prompt_mode"), EMPTY),
    **dict.fromkeys(("instructions", "previous_response_id", "system", "input", "format"), EMPTY),
    **dict.fromkeys(("thinking", "think"), refused(why="; use `chat_template_kwargs`")),
    **dict.fromkeys(("extra_body", "options"), refused({}, why="; put its fields at the top level")),
    **dict.fromkeys(
        ("truncate_prompt_tokens", "prompt_truncate_len", "prompt_truncate_length", "truncate"),
        refused(why="; cut the prompt in the client, `/tokenize` counts its tokens"),
    ),
}

INSTEAD = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of chats that have another name in `/v1/responses`."""


def check_foreign(unknown: Mapping[str, Any]) -> None:
    """Raise `InvalidField` for an unsupported field that would change the output."""
    for name, value in unknown.items():
        if name in FOREIGN or (name.startswith("guided_") and name != "guided_decoding_backend"):
            FOREIGN.get(name, FORMAT).check(name, value)


def check_elsewhere(unknown: Mapping[str, Any], other: type[BaseModel], endpoint: str) -> None:
    """Raise `InvalidField` for a field of another endpoint, unless the field has its default value."""
    for name, value in unknown.items():
        if field := other.model_fields.get(name):
            marks = [mark for mark in field.metadata if isinstance(mark, NeutralOnly)]
            instead = INSTEAD.get(name, endpoint)
            mark = marks[0] if marks else NeutralOnly(*neutral(field.default), why=f"; use `{instead}`")
            if not isinstance(mark, Hint):
                mark.check(name, value)


def neutral(default: Any) -> list[Any]:
    if default in (PydanticUndefined, None):
        return []
    is_integer = isinstance(default, float) and default.is_integer()
    return [default, int(default)] if is_integer else [default]
