"""One server of many processes: a gateway with the public interface, and replicas that each run a model.

Only `deployment` knows Ray; the rest works with any pool.
"""
