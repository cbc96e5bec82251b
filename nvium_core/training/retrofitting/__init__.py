"""Exits for an existing model. `retrofit` is the command, `run` the training, `model` what is trained: exits learn the
last exit's distribution first, then routers learn to use them.
"""
