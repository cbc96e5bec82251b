"""llama.cpp as a contender. It decodes all sequences in one batch. Requires the packages llama_cpp and gguf.

It runs in a process of its own, so that a crash ends only this process. The package llama_cpp declares the functions;
the library may be the package's or another. The environment variable `LLAMA_CPP_LIB_PATH`, which is the package's own,
names the folder of another build, such as `bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvium_core.bench.contenders.contender import ContenderFailed, Generation, NotAvailable, Workload
from nvium_core.bench.contenders.gguf_file import FileKind
from nvium_core.bench.figures import Figures

NEEDED = ("llama_cpp", "gguf")
MIN_BATCH_TOKENS = 512  # llama.cpp's default

PACKAGE = "llama_cpp"

SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def check_available(device: str) -> None:
    """Raise `NotAvailable` if llama.cpp cannot run here."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotAvailable(f"{' and '.join(missing)} not installed; run pip install 'nvium[bench]'")
    if device != "cpu":
        raise NotAvailable("only supported on a CPU")
    if not builds():
        raise NotAvailable("llama_cpp has no library; set LLAMA_CPP_LIB_PATH to the folder of a build")


class LlamaCpp:
    """A model in llama.cpp, with a KV cache for `workload`. For an f32 file, cache and attention are float32 too.

    build: folder of llama.cpp's libraries.
    repacks: repack quantized weights for the fastest kernels ("extra buffers"). Some builds crash then.
    """

    def __init__(
        self,
        build: Path,
        file: Path,
        kind: FileKind | None,
        workload: Workload,
        threads: int,
        *,
        repacks: bool = True,
    ) -> None:
        self._lib = lib = load(build)
        features = lib.llama_print_system_info().decode()
        self.description = {"version": lib.llama_version().decode(), "features": features}
        lib.llama_backend_init()
        self._workload, self._batch_tokens = workload, workload.num_sequences * len(workload.prompt)
        model_params = lib.llama_model_default_params()
        model_params.use_extra_bufts = repacks
        self._model = lib.llama_model_load_from_file(str(file).encode(), model_params)
        if self._model is None:
            raise ContenderFailed(f"llama.cpp cannot load {file.name}")
        params = self._params(kind, threads)
        self._context = lib.llama_init_from_model(self._model, params)
        if self._context is None:
            lib.llama_model_free(self._model)
            raise ContenderFailed(f"llama.cpp cannot allocate a cache of {params.n_ctx} tokens")
        self._batch = lib.llama_batch_init(self._batch_tokens, 0, 1)

    def _params(self, kind: FileKind | None, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = self._workload.num_sequences * self._workload.num_positions
        params.n_seq_max = self._workload.num_sequences
        params.n_batch = params.n_ubatch = max(MIN_BATCH_TOKENS, self._batch_tokens)
        params.n_threads = params.n_threads_batch = threads
        if kind == "f32":
            params.type_k = params.type_v = self._lib.GGML_TYPE_F32
            params.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # on a CPU it rounds to float16
        return params

    def clear(self) -> None:
        """Empty the KV cache."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode a batch of rows. A row is (token, position, sequence, whether its logits are needed)."""
        batch = self._batch
        assert len(rows) <= self._batch_tokens
        for row, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = is_wanted
        batch.n_tokens = len(rows)
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise ContenderFailed(f"llama_decode failed with status {status}")

    def logits(self, rows: range) -> Tensor:
        """Return a copy of the logits of these rows of the last batch, which were wanted, [R, V]."""
        lib, vocab = self._lib, self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        pointers = (lib.llama_get_logits_ith(self._context, row) for row in rows)
        return torch.from_numpy(np.stack([np.ctypeslib.as_array(pointer, (vocab,)) for pointer in pointers]))

    @contextmanager
    def sampler(self, seed: int) -> Iterator[Any]:
        """Yield a function that samples a token from a row's logits, at temperature 1, without top-k or top-p."""
        chain = self._lib.llama_sampler_chain_init(self._lib.llama_sampler_chain_default_params())
        self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_dist(seed))
        try:
            yield lambda row: self._lib.llama_sampler_sample(chain, self._context, row)
        finally:
            self._lib.llama_sampler_free(chain)

    def generate(self, turn: int) -> Generation:
        """Run the workload. `turn` is the seed."""
        length, sequences = len(self._workload.prompt), range(self._workload.num_sequences)
        prompts = [
            (token, position, sequence, position == length - 1)
            for sequence in sequences
            for position, token in enumerate(self._workload.prompt)
        ]
        self.clear()
        with self.sampler(turn) as draw:
            started = time.perf_counter()
            self.decode(prompts)
            outputs = [[draw(sequence * length + length - 1)] for sequence in sequences]
            first_seconds = time.perf_counter() - started
            for position in range(length, self._workload.num_positions - 1):
                self.decode([(outputs[sequence][-1], position, sequence, True) for sequence in sequences])
                for sequence in sequences:
                    outputs[sequence].append(draw(sequence))
            seconds = time.perf_counter() - started
        return Generation(seconds=seconds, first_token_seconds=[first_seconds] * len(sequences), token_ids=outputs)

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


class Process:
    """A contender that runs `LlamaCpp`, with the same arguments, in a process of its own.

    Raises `ContenderFailed` if the model cannot be loaded.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, arguments, options), daemon=True)
        self._process.start()
        other.close()
        self.description: Figures = self._receive()

    def __call__(self, turn: int) -> Generation:
        """Run a turn. Raise `ContenderFailed` if the process fails or crashes."""
        with suppress(OSError):  # `_receive` says why
            self._connection.send(turn)
        generation: Generation = self._receive()
        return generation

    def _receive(self) -> Any:
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            cause = signal.strsignal(-code) if code < 0 else f"exit status {code}"
            raise ContenderFailed(f"llama.cpp crashed ({cause})") from None
        if isinstance(result, ContenderFailed):
            raise result
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Send the build's description, then each turn's generation, until the connection closes."""
    with suppress(EOFError):
        try:
            with closing(LlamaCpp(*arguments, **options)) as model:
                connection.send(model.description)
                while True:
                    connection.send(model.generate(connection.recv()))
        except ContenderFailed as failure:
            connection.send(failure)


def builds() -> dict[str, Path]:
    """Return the folders of all builds by label. The label of the package's own build is empty."""
    spec, named = find_spec(PACKAGE), os.environ.get("LLAMA_CPP_LIB_PATH")
    folders = {"": Path(spec.origin).parent / "lib"} if spec and spec.origin else {}
    folders |= {Path(named).name: Path(named)} if named else {}
    return {label: folder for label, folder in folders.items() if _library_file(folder)}


def load(folder: Path) -> Any:
    """Return the functions of llama_cpp, which run the build in `folder`. A process can load one build."""
    spec = find_spec(PACKAGE)
    file = _library_file(folder)
    assert spec is not None and file is not None
    sys.modules[PACKAGE] = module_from_spec(spec)  # without running it, which would load the package's own build
    library = Library(str(file))
    extensions: Any = import_module(f"{PACKAGE}._ctypes_extensions")
    extensions.load_shared_library = lambda *_: library
    library.llama_log_set(SILENCE, None)
    if not library.ggml_backend_dev_count():  # the build has a library of kernels per kind of processor
        library.ggml_backend_load_all_from_path(str(folder).encode())
    return import_module(f"{PACKAGE}.llama_cpp")


def _library_file(folder: Path) -> Path | None:
    """Return libllama.so, also if its name has a version."""
    return next(folder.glob("libllama.*"), None)


class Library(ctypes.CDLL):
    """A library of another version than the declarations. A function that it lacks fails only when it is called."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise

        def missing(*_: object) -> None:
            raise ContenderFailed(f"this build of llama.cpp lacks {name}")

        return missing
