"""Simple tales to train on, written by a small instruction-tuned Llama that is led from part to part.

    python -m research.tales tell MODEL FOLDER     # continues where it stopped
    python -m research.tales pack FOLDER OUT.xz --words-from TEXT
    python -m research.tales --help    # vary, ask and instruct make texts to train on

A plot is drawn (hero, place, object, helper, turn). The model is asked for the story, and is given the first sentence
of every part; it writes the rest. Led like this, a model of 135M parameters keeps to its subject.
"""
