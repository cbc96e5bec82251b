"""Serving from several processes: a gateway with the public API, and replicas that each run the model.

Only `deployment` imports Ray. The other modules work with any `Pool` of replicas.
"""
