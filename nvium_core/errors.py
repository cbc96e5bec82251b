"""The base of all errors that a user can cause. Any other exception is a bug.

NviumError
├── CheckpointError     a model that cannot be loaded                (model.checkpoint)
├── ConversionError     a target that cannot be written              (conversion)
├── InvalidRequest      a request or limit that cannot be served     (engine.params)
├── EngineError         a sequence that failed                       (engine.failures)
├── TokenizerError      an unsupported tokenizer in a GGUF file      (text.gguf_tokenizer)
├── ConversationError   messages that a chat template rejects        (text.chat_template)
├── DataError           text that cannot be used                     (training.data.documents)
├── RecipeError         an unknown recipe or setting                 (training.recipes.recipe)
├── TrainingError       training that cannot continue                (training.errors)
├── BetaError           a dense run's log that cannot be used        (training.objective.beta)
├── RetrofitError       a model that cannot be retrofitted           (training.retrofitting.shape)
├── EvaluationError     a model or text that cannot be evaluated     (evaluation.predictions)
└── SettingsError       an invalid server setting                    (server.settings)
"""

import re


class NviumError(Exception):
    """An error that the user can correct. The message says how."""


def plain(message: str) -> str:
    """Rephrase an error message of pydantic or click."""
    words = {"Extra inputs are not permitted": "is unknown", "Field required": "is missing"}
    shortened = re.sub(r"Value error, |, unable to parse .*", "", message)
    return words.get(message) or shortened.replace("Input should be", "must be")
