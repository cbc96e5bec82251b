"""One server of many processes: a front that holds the contract, and replicas that each run a model.

What knows Ray is in `router`, `replica`, `deployment` and `launch`; all else would work with any other pool.
"""
