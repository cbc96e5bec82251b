"""Errors that users cause and read; any other exception is a bug of ours.

NviumError
├── CheckpointError     a model folder that cannot be loaded         (model.checkpoint)
├── ConversionError     a folder that cannot be written to           (conversion)
├── InvalidRequest      a request or limit that cannot be served     (engine.params)
├── EngineError         a sequence that failed                       (engine.failures)
├── TokenizerError      an unknown kind of tokenizer in a GGUF file  (text.gguf_tokenizer)
├── ConversationError   messages that a chat template refuses        (text.chat_template)
├── DataError           text that cannot be used                     (training.data.documents)
├── RecipeError         an unknown recipe or setting                 (training.recipes.recipe)
├── TrainingError       training that cannot go on                   (training.errors)
├── BetaError           a dense run's log that cannot be used        (training.objective.beta)
├── RetrofitError       a model that cannot be given exits           (training.retrofitting.shape)
├── EvaluationError     something that cannot be evaluated           (evaluation.predictions)
└── SettingsError       an invalid server setting                    (server.settings)
"""

import re

NOT_OURS = re.compile(r"Value error, |, unable to parse .*")
"""Of a validation library's messages, what tells a user nothing."""


class NviumError(Exception):
    """An error that its user can correct; the message says what to change."""


def plain(message: str) -> str:
    """A validation library's message in plain words."""
    words = {"Extra inputs are not permitted": "is unknown", "Field required": "is missing"}
    return words.get(message) or NOT_OURS.sub("", message).replace("Input should be", "must be")
