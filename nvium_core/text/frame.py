"""The special tokens that a tokenizer puts before and after a text."""

from tokenizers import Tokenizer, models, processors

ONE_TOKEN = Tokenizer(models.WordLevel({"a": 0}, "a")).encode("a")


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and after a text. The tokenizer must not truncate."""
    framed = tokenizer.post_process(ONE_TOKEN)
    place = [*framed.special_tokens_mask, 0].index(0)  # a damaged post-processor may drop the text
    return framed.ids[:place], framed.ids[place + 1 :]


def set_frame(tokenizer: Tokenizer, before: list[int], after: list[int]) -> None:
    special = [{"id": str(token), "ids": [token], "tokens": [tokenizer.id_to_token(token)]} for token in before + after]
    single = [*map(str, before), "$A", *map(str, after)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
