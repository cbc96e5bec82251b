"""Ray's request router, which sends a request where its beginning has been seen, and else where least is to be done."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.replicas.affinity import Memory, preferred


class AffineRouter(RequestRouter):  # type: ignore[misc]
    """The arguments of a request are its beginnings (`affinity.beginnings`) and the names of who is not to have it."""

    def initialize_state(self, *, is_affine: bool = True) -> None:
        """Called by Ray once, before the first request."""
        self._is_affine = is_affine
        self._memory = Memory()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred one first, then all others, for when it is full."""
        beginnings, excluded = pending_request.args if pending_request and pending_request.args else ([], [])
        if pending_request:
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name in excluded if replicas.keys() - set(excluded) else ():
            replicas.pop(name, None)
        loads = {name: self._load(replicas[name]) for name in random.sample(list(replicas), len(replicas))}
        chosen = preferred(beginnings, self._memory.holders, loads)
        if self._is_affine:
            self._memory.note(beginnings, chosen)
        first = replicas.pop(chosen)
        self.on_send_request(first.replica_id)  # for those that come before it has said how many it has
        return [[first], list(replicas.values())]

    def _load(self, replica: RunningReplica) -> int:
        """Requests it is busy with, by what it said last and what was sent since."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
