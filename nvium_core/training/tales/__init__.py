"""Simple tales to train on, written by a small instruction-tuned Llama that is led from part to part.

    python -m nvium_core.training.tales tell MODEL FOLDER     # continues where it stopped
    python -m nvium_core.training.tales pack FOLDER OUT.xz --words-from TEXT

A plot is drawn (hero, place, object, helper, turn). The model is asked for the story, and is given the first sentence
of every part; it writes the rest. Led like this, a model of 135M parameters keeps to its subject.
"""
