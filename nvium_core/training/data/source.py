"""A run's training and validation data: documents or conversations, depending on the recipe."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.chat_data import prepare_conversations, validation_conversations
from nvium_core.training.chat.conversations import CHAT_SUFFIXES, holds_conversations
from nvium_core.training.data.tokens import prepare_documents, validation_documents
from nvium_core.training.data.windows import Windows
from nvium_core.training.errors import DataError
from nvium_core.training.recipes.recipe import Recipe


def prepare_text(recipe: Recipe, data: Path, folder: Path) -> tuple[PreTrainedTokenizerBase, Windows]:
    """Return the tokenizer and the training windows. Reuse the tokens in the run's folder, or write them there.

    Raise `DataError` if the data contain conversations and the recipe trains on documents, or the reverse.
    """
    check_kind(recipe, data)
    return (prepare_documents if recipe.text == "documents" else prepare_conversations)(recipe, data, folder)


def check_kind(recipe: Recipe, data: Path) -> None:
    if recipe.text == "documents" and holds_conversations(data):
        raise DataError(
            f"{data}: contains conversations, but this recipe trains on documents; "
            "use the recipe `stories-chat` with --set initial=MODEL"
        )
    if recipe.text == "conversations" and data.exists() and not data.name.endswith(CHAT_SUFFIXES):
        raise DataError(
            f"{data}: contains documents, but this recipe trains on conversations (.jsonl); "
            "use a recipe such as `small`"
        )


def validation_text(recipe: Recipe, data: Path, tokenizer: PreTrainedTokenizerBase) -> Windows:
    check_kind(recipe, data)
    if recipe.text == "conversations":
        return validation_conversations(recipe, data, tokenizer)
    return validation_documents(recipe, data, tokenizer)
