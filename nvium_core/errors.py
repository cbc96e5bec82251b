"""The errors that are told to whoever caused them, by message; anything else is a bug of ours.

NviumError
├── CheckpointError     a model folder that cannot be loaded         (model.checkpoint)
├── ConversionError     a folder that cannot be written to           (conversion)
├── InvalidRequest      a request or limit that cannot be served     (engine.params)
├── EngineError         a sequence that could not be run to its end  (engine.failures)
├── TokenizerError      a tokenizer that a GGUF file names in vain  (text.gguf_tokenizer)
├── ConversationError   messages that a chat template does not take  (text.chat_template)
├── DataError           text that cannot be used                     (training.data.documents)
├── RecipeError         an unknown recipe or setting                 (training.recipes.recipe)
├── TrainingError       training that cannot go on                   (training.errors)
├── BetaError           a dense run's log that cannot be used        (training.objective.beta)
├── RetrofitError       a model that exits cannot be put on          (training.retrofit)
├── EvaluationError     something that cannot be evaluated as asked   (evaluation.predictions)
└── SettingsError       a server setting that is not one             (server.settings)
"""


class NviumError(Exception):
    """An error whose message says what to change."""
