"""Runs tests of the single-process server against a gateway with two replicas."""

from tests.server.http.test_bodies import test_requests_that_a_proxy_may_parse_differently_are_refused
from tests.server.http.test_disconnects import test_a_disconnect_aborts_the_choices_of_the_request
from tests.server.routes.test_chat import (
    test_a_stream_begins_with_roles_and_ends_each_choice_with_its_reason as test_a_chat_streams_in_order,
)
from tests.server.routes.test_completions import (
    test_a_body_is_parsed_as_json_with_curls_content_types,
    test_a_prompt_in_a_list_and_choice_zero_behave_as_if_sent_alone,
    test_a_repeated_prompt_is_taken_from_the_cache,
    test_every_sampling_field_reaches_the_engine_whose_tokens_and_exits_are_answered,
    test_unknown_fields_are_named_in_a_header_without_unsafe_characters,
    test_usage_is_streamed_only_when_asked_for,
)
from tests.server.routes.test_tokenize import (
    test_a_long_text_is_tokenized,
    test_messages_have_the_tokens_of_a_chats_prompt,
)
from tests.server.structured_outputs.test_structured_outputs import (
    test_an_answer_matches_its_regex_or_is_one_of_the_choices,
)
from tests.server.test_limits import (
    test_a_list_of_1024_prompts_is_answered_in_order,
    test_expect_100_continue_is_answered,
    test_odd_targets_are_not_found,
    test_pipelined_requests_are_answered_in_order,
    test_the_maximum_body_size_is_allowed_and_not_a_byte_more,
)
from tests.server.test_operations import (
    test_a_strict_client_lists_and_finds_the_model,
    test_metrics_count_tokens_and_requests,
    test_probes_succeed_and_reveal_nothing,
)
from tests.server.test_refusals import (
    test_a_lone_surrogate_is_not_an_internal_error,
    test_a_strict_client_raises_the_right_errors,
    test_an_exceeded_context_is_refused_with_its_numbers,
    test_an_invalid_field_is_refused_with_its_name,
    test_unknown_routes_and_methods_have_the_same_error_format,
)
from tests.server.test_tools import test_a_required_call_names_one_of_the_functions
from tests.server.writers.test_answers import test_an_echoed_prompt_is_scored_with_null_first
from tests.server.writers.test_answers import test_completions as test_a_stream_is_the_whole
