"""The options of the command line, the environment and Python, each declared once. Imports no torch.

To add an option, declare a field with its type, bounds (`annotated_types`), help (`Doc`) and default:

    prompt_lookup: Annotated[int, Ge(0), Doc("Tokens to look up in the prompt.")] = 0

- Fields of `ModelOptions` are options of every command decorated with `@takes(ModelOptions)`.
- Fields of `EngineConfig` are passed to the engine.
- `ServerOptions` inherits both. Each field is `--prompt-lookup` of `nvium serve`, `NVIUM_PROMPT_LOOKUP` in the
  environment and `settings.prompt_lookup` in the server. `server/settings.py` has the checks beyond bounds, and Helm's
  `values.schema.json` must name the field.
- Fields with a `Doc` of `RunOptions` and `RetrofitSettings` are options of `nvium train` and `nvium retrofit`.

Square brackets at the end of a help text describe the default.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Interval, MinLen
from typing_extensions import Doc

from nvium_core.choices import Device, ExitTarget, GenerationDefaults, LogLevel, Precision, Sampling, Weights
from nvium_core.engine.config import EngineConfig, ProcessorOptions
from nvium_core.errors import TrainingError

Positive = Annotated[int, Ge(1)]
Seconds = Annotated[float, Interval(gt=0, lt=inf)]
Name = Annotated[str, MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ProcessorOptions):
    """Options for loading a model."""

    exits: Annotated[str | None, Doc("Folder or Hub name of exits trained for the model (`nvium retrofit`).")] = None
    device: Annotated[Device, Doc("Device; auto is CUDA if available, else the CPU.")] = "auto"
    dtype: Annotated[Precision, Doc("Precision; auto: float32 on CPU, bfloat16 (old GPUs: float16) on CUDA.")] = "auto"
    weights: Annotated[
        Weights,
        Doc(
            "Weight format; native rounds a quantized GGUF file to bfloat16 if dtype is auto, but leaves it quantized "
            "if dtype is float32; q8 and q4 quantize to 8 or 4 bits."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters of `nvium generate` and `nvium chat`."""

    seed: Annotated[int | None, Doc("For reproducible sampling: same seed, same text.")] = None
    temperature: Annotated[float | None, Doc("0 takes the most probable token [the model's default, else 1].")] = None
    top_p: Annotated[float | None, Doc("Nucleus sampling [the model's default, else 1].")] = None
    sampling: Annotated[
        Sampling | None,
        Doc("Sample from the exit taken, the mixture, the last exit, or the threshold's exit [the model's default]."),
    ] = None
    exit_threshold: Annotated[
        float | None, Doc("With sampling threshold: cumulative probability at which a token leaves; 1: the last exit.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineConfig, ModelOptions):
    """The options of `nvium serve`. A request has `n` choices for each of its prompts."""

    model: Annotated[str | None, Doc("Folder, Hub name or GGUF file [the bundled model].")] = None
    served_model_name: Annotated[tuple[Name, ...], Doc("Model names that requests may use [the folder's name].")] = ()
    generation_config: Annotated[
        GenerationDefaults, Doc("Defaults of sampling parameters; auto is the model's own, off is OpenAI's.")
    ] = "auto"
    chat_template: Annotated[Path | None, Doc("File with a chat template to use instead of the model's own.")] = None
    host: Annotated[str, Doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535), Doc("Port to listen on; 0 picks a free one.")] = 8000
    root_path: Annotated[str, Doc("URL path under which a proxy serves this server, such as /llm.")] = ""
    log_level: Annotated[LogLevel, Doc("Lowest severity to log.")] = "info"

    max_queue: Annotated[int, Ge(0), Doc("Maximum waiting sequences; 0 refuses what cannot run at once.")] = 1024
    max_prompts: Annotated[Positive, Doc("Maximum prompts per request.")] = 1024
    max_n: Annotated[Positive, Doc("Maximum choices per prompt.")] = 128
    max_new_tokens: Annotated[Positive, Doc("Maximum tokens per request: choices × max_tokens.")] = 262_144
    clamp_max_tokens: Annotated[
        bool, Doc("Shorten a max_tokens that exceeds the context instead of refusing the request.")
    ] = False
    max_body_bytes: Annotated[Positive, Doc("Maximum size of a request body.")] = 2_000_000
    max_present_bytes: Annotated[Positive, Doc("Maximum total size of the bodies of open requests.")] = 64_000_000
    max_connections: Annotated[Positive, Doc("Maximum connections; a new one closes the oldest that waits.")] = 4096

    api_keys: Annotated[
        tuple[str, ...],
        Doc("API keys, each KEY or NAME:KEY; users of the machine can see them, so prefer a file [none]."),
    ] = ()
    api_keys_file: Annotated[Path | None, Doc("File of API keys, one per line, with # comments.")] = None
    metrics_open: Annotated[bool, Doc("Serve /metrics without a key.")] = False
    requests_per_minute: Annotated[
        Positive | None, Doc("Rate limit of each API key; without keys, of all clients together [none].")
    ] = None
    allowed_hosts: Annotated[
        tuple[Name, ...],
        Doc("Additional host names, such as *.example.org, that a server without keys accepts [none]."),
    ] = ()
    playground: Annotated[bool, Doc("Serve the playground, a page at / to try the model.")] = True
    ssl_certfile: Annotated[Path | None, Doc("Certificate chain (PEM); enables https and disables http.")] = None
    ssl_keyfile: Annotated[Path | None, Doc("Private key of the certificate, if not in the same file.")] = None
    cors_origins: Annotated[tuple[str, ...], Doc("Origins of web pages that may call the server [none].")] = ()
    latency_buckets: Annotated[
        tuple[float, ...], Doc("Bucket bounds of all latency histograms, in seconds [per histogram].")
    ] = ()

    replicas: Annotated[Positive | None, Doc("Number of replicas: server processes behind one address [none].")] = None

    request_seconds: Annotated[Seconds | None, Doc("Maximum duration of a request [no limit].")] = None
    arrival_seconds: Annotated[Seconds, Doc("How long a client may take to send a request.")] = 60
    slow_client_seconds: Annotated[
        Seconds, Doc("Disconnect a client that stops reading its response for this long.")
    ] = 60
    goodbye_seconds: Annotated[
        float, Interval(ge=0, lt=inf), Doc("After SIGTERM, accept requests for this long while /readyz fails.")
    ] = 0
    drain_seconds: Annotated[Seconds, Doc("After that, wait this long for running requests to finish.")] = 30
    keep_alive_seconds: Annotated[Seconds, Doc("Interval of keep-alive comments on a silent stream.")] = 15
    http_keep_alive_seconds: Annotated[Seconds, Doc("How long an idle connection is kept open.")] = 75
    stall_seconds: Annotated[
        Seconds | None, Doc("How long a Step may take before /livez fails [30; 10 with --replicas].")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a recipe is trained."""

    data: Path
    folder: Path
    device: str = "cpu"
    compile: bool = False
    validation: Annotated[Path | None, Doc("Held-out text for periodic evaluation.")] = None
    rows_per_pass: Annotated[int, Doc("Maximum tokens per forward pass; limits memory.")] = 16_384
    logger: Annotated[str, Doc("Where to log besides log.jsonl: tensorboard, wandb or tensorboard,wandb.")] = ""

    def __post_init__(self) -> None:
        if self.rows_per_pass < 1:
            raise TrainingError(f"rows_per_pass must be at least 1, got {self.rows_per_pass}")

    @property
    def loggers(self) -> list[str]:
        return [name.strip() for name in self.logger.split(",") if name.strip()]


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """The settings of a retrofit."""

    source: str
    target: Path
    data: Annotated[
        Path | None,
        Doc("Text in a format that `nvium train` reads, or a .jsonl of conversations [text that the model generates]."),
    ] = None
    self_talk: Annotated[
        int | None, Doc("Training tokens that the model generates itself [without --data a third of --tokens].")
    ] = None
    exits: Annotated[str, Doc("Number of exits, or their layers, such as 12,18,24.")] = "4"
    tokens: Annotated[int, Doc("Number of training tokens; a shorter text is repeated.")] = 1_000_000
    depth: Annotated[float, Doc("Mean depth that the routers are trained for, as a share of all layers.")] = 0.9
    exits_learn: Annotated[
        ExitTarget,
        Doc("Training target of early exits: the base's distribution (original), or also --data (text)."),
    ] = "original"
    seed: int = 0

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // 3)  # three epochs
