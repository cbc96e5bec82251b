"""The options of command line, environment and Python, each declared once.

    prompt_lookup: Annotated[int, Ge(0), Doc("Tokens to look up in the prompt.")] = 0

To add an option, add such a field: its type with its bounds (`annotated_types`), its help (`Doc`) and its default.

- A field of `ModelOptions` is an option of every command that runs a model, which is decorated `@takes(ModelOptions)`.
- A field of `EngineConfig` reaches the engine by its name.
- `ServerOptions` has them all; each is `--prompt-lookup` of `nvium serve`, `NVIUM_PROMPT_LOOKUP` in the environment and
  `settings.prompt_lookup` in the server. Checks beyond a bound are in `server/settings.py`; a test asks for it in
  Helm's `values.schema.json`.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Interval, MinLen
from typing_extensions import Doc

from nvium_core.choices import Device, Instructions, LogLevel, Precision, Weights
from nvium_core.engine.params import EngineConfig

Positive = Annotated[int, Ge(1)]
Seconds = Annotated[float, Interval(gt=0, lt=inf)]
Name = Annotated[str, MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    exits: Annotated[str | None, Doc("Exits made for the model: a folder or Hub name (`nvium retrofit`).")] = None
    device: Annotated[Device, Doc("auto is CUDA where there is one.")] = "auto"
    dtype: Annotated[Precision, Doc("auto is float32 on CPU, bfloat16 (or float16 on old GPUs) on CUDA.")] = "auto"
    weights: Annotated[Weights, Doc("q8 and q4: in blocks of 32 with a scale; less is read, more rounded.")] = "auto"
    instructions: Annotated[Instructions, Doc("A CPU's vector instructions; auto is the widest it has.")] = "auto"
    threads: Annotated[str, Doc("Threads of a CPU; auto is PyTorch's choice.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineConfig, ModelOptions):
    """The options of `nvium serve`. A request's choices are its prompts times its `n`."""

    model: Annotated[str | None, Doc("A folder, Hub name or GGUF file; the bundled model if left out.")] = None
    served_model_name: Annotated[tuple[Name, ...], Doc("Names that the model answers to [its folder's].")] = ()
    chat_template: Annotated[Path | None, Doc("File with a chat template, in place of the model's own.")] = None
    host: Annotated[str, Doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Interval(ge=0, le=65535), Doc("Port to listen on; 0 is any free one.")] = 8000
    root_path: Annotated[str, Doc("Path under which a proxy shows the server, such as /llm.")] = ""
    log_level: Annotated[LogLevel, Doc("The least severe log lines to write.")] = "info"

    max_queue: Annotated[int, Ge(0), Doc("Choices that may wait beyond those that run.")] = 1024
    max_prompts: Annotated[Positive, Doc("Prompts of one request.")] = 1024
    max_n: Annotated[Positive, Doc("Choices per prompt.")] = 128
    max_new_tokens: Annotated[Positive, Doc("Choices × max_tokens of one request.")] = 262_144
    clamp_max_tokens: Annotated[bool, Doc("Shorten a max_tokens that the context cannot hold; else refuse it.")] = False
    max_body_bytes: Annotated[Positive, Doc("Size of a request's body.")] = 2_000_000
    max_present_bytes: Annotated[Positive, Doc("Size of the bodies of all unanswered requests.")] = 64_000_000
    max_connections: Annotated[Positive, Doc("Clients connected at once.")] = 4096

    api_keys: Annotated[tuple[str, ...], Doc("KEY or NAME:KEY; safer as NVIUM_API_KEYS or in a file [none].")] = ()
    api_keys_file: Annotated[Path | None, Doc("File of such keys, one a line, with # comments.")] = None
    metrics_open: Annotated[bool, Doc("Whether /metrics can be read without a key.")] = False
    requests_per_minute: Annotated[
        Positive | None, Doc("Rate limit of each key, or of all clients without keys [none].")
    ] = None
    allowed_hosts: Annotated[
        tuple[Name, ...], Doc("Names, such as *.example.org, that reach a server without keys [its own].")
    ] = ()
    playground: Annotated[bool, Doc("A page at / to try the model.")] = True
    ssl_certfile: Annotated[Path | None, Doc("Certificate chain (PEM); then https only.")] = None
    ssl_keyfile: Annotated[Path | None, Doc("Its key, if not in the same file.")] = None
    cors_origins: Annotated[tuple[str, ...], Doc("Origins of pages that may call the server [none].")] = ()
    otlp_endpoint: Annotated[str | None, Doc("OpenTelemetry collector for traces (OTLP over HTTP) [none].")] = None
    latency_buckets: Annotated[
        tuple[float, ...], Doc("Upper bounds of all latency histograms, in seconds [each its own].")
    ] = ()

    replicas: Annotated[Positive | None, Doc("Processes with a model each, by Ray [one, without Ray].")] = None
    max_replicas: Annotated[Positive | None, Doc("Scale up to this many under load [--replicas].")] = None
    sequences_per_replica: Annotated[Positive, Doc("Running and waiting sequences that call for one more.")] = 16
    prefix_affinity: Annotated[bool, Doc("Send prompts to the replica that has seen their prefix.")] = True
    upscale_seconds: Annotated[Seconds, Doc("How long load must last before replicas are added.")] = 10
    downscale_seconds: Annotated[Seconds, Doc("How long replicas must idle before they are removed.")] = 300

    request_seconds: Annotated[Seconds | None, Doc("How long a request may take [no limit].")] = None
    arrival_seconds: Annotated[Seconds, Doc("How long a request may take to arrive.")] = 60
    slow_client_seconds: Annotated[Seconds, Doc("How long a client may stop reading its response.")] = 60
    drain_seconds: Annotated[Seconds, Doc("How long running requests may finish after SIGTERM.")] = 30
    keep_alive_seconds: Annotated[Seconds, Doc("Seconds between comments on a silent stream.")] = 15
    http_keep_alive_seconds: Annotated[Seconds, Doc("How long an idle connection is kept open.")] = 75
    stall_seconds: Annotated[
        Seconds, Doc("How long a Step, or other work off the event loop, may take before /livez fails.")
    ] = 30
