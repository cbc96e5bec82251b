"""Serving from several processes: a gateway with the public API, and replicas that each run the model."""
