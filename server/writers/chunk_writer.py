"""The common part of the completions and chat writers: streams of chunks."""

import time
from typing import ClassVar

from pydantic_core import to_json

from server.generation.delta import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.generation import Generated, GeneratedChoice, StreamOptions
from server.writers.writer import AnyRequest, Writer


class ChunkWriter(Writer[AnyRequest]):
    """Writes a stream of chunks. Subclasses define the format of a chunk."""

    chunk_object: ClassVar[str]
    """The chunks' `object` field."""

    def __init__(self, service: Service, request: AnyRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation)
        self._options = request.stream_options or StreamOptions()
        self._num_ended = 0
        self._envelope: Generated = {
            "id": response_id,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": service.fingerprint,
        }

    def _closing(self) -> list[bytes]:
        if not self._options.include_usage:
            return []
        return [to_json({**self._envelope, "usage": self._usage(), "object": self.chunk_object, "choices": []})]

    def _choice(self, delta: Delta, index: int) -> GeneratedChoice:
        """Return the common fields of a choice, and count its tokens as generated."""
        self._count(delta)
        self._num_ended += delta.finish_reason is not None
        fields: GeneratedChoice = {"index": index, "finish_reason": delta.finish_reason}
        if delta.finish_reason:
            fields["stop_reason"] = delta.stop_reason
        if self._request.nvium.metadata:
            fields["nvium"] = self._token_exits(delta)
        if self._request.return_token_ids:
            fields["token_ids"] = [event.token_id for event in delta.tokens]
        return fields

    def _response_fields(self) -> Generated:
        """Return the common fields of a whole response. Call it after writing the choices."""
        return self._with_summary({**self._envelope, "usage": self._usage()})

    def _chunk_fields(self) -> Generated:
        """Return the common fields of a chunk. Call it after writing the chunk's choice, which the summary counts."""
        fields = self._envelope.copy()
        if self._options.continuous_usage_stats:
            fields["usage"] = self._usage()
        elif self._options.include_usage:
            fields["usage"] = None
        return self._with_summary(fields) if self._num_ended == len(self.generation.choices) else fields

    def _with_summary(self, fields: Generated) -> Generated:
        if self._request.nvium.metadata:
            fields["nvium"] = self._exit_summary()
        if self._request.metadata is not None:
            fields["metadata"] = self._request.metadata
        return fields
