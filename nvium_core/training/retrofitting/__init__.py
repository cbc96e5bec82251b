"""Exits for a model that exists. `retrofit` is the command, `run` the training, `model` what is trained; first exits
learn the last exit's distribution, then routers are offered them. `papers_start` is the paper's way, which collapses.
"""
