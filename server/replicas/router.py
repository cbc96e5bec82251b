"""Ray's request router: prefers the replica with a request's prefix in its cache, else the idlest."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.replicas.affinity import PrefixHolders, preferred


class AffineRouter(RequestRouter):  # type: ignore[misc]
    """A request's arguments are its prefixes (`affinity.beginnings`) and the names of excluded replicas."""

    def initialize_state(self, *, is_affine: bool = True) -> None:
        """Called once by Ray, before the first request."""
        self._is_affine = is_affine
        self._prefixes = PrefixHolders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred one first, then the others in case it is full."""
        beginnings, excluded = pending_request.args if pending_request and pending_request.args else ([], [])
        if pending_request:
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name in excluded if replicas.keys() - set(excluded) else ():
            replicas.pop(name, None)
        loads = {name: self._load(replicas[name]) for name in random.sample(list(replicas), len(replicas))}
        chosen = preferred(beginnings, self._prefixes.by_prefix, loads)
        if self._is_affine:
            self._prefixes.note(beginnings, chosen)
        first = replicas.pop(chosen)
        self.on_send_request(first.replica_id)  # counts before the replica reports its load
        return [[first], list(replicas.values())]

    def _load(self, replica: RunningReplica) -> int:
        """Its requests: those it last reported and those sent since."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
