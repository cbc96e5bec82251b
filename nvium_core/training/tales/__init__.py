"""Simple tales to train on, told by a small instruction-tuned Llama that is led from part to part.

    python -m nvium_core.training.tales tell MODEL FOLDER     # goes on where it stopped; end it whenever
    python -m nvium_core.training.tales pack FOLDER OUT.xz --words TEXT

A plot is drawn (hero, place, object, helper, turn). The model is asked for the story, and the first sentence of every
part is given to it; what it writes between them is its own. Led so, a model of 135M parameters keeps to its subject.
"""
