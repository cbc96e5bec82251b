"""Generate synthetic stories ("tales") for training with a small instruction-tuned Llama.

    python -m research.tales tell MODEL FOLDER     # resumes
    python -m research.tales pack FOLDER OUT.xz --words-from TEXT
    python -m research.tales --help    # vary, ask and instruct turn tales into training data

A plot is sampled (hero, place, object, helper, twist). The prompt asks the model for the story. The first sentence of
every part is forced, and the model writes the rest. So even a model of 135M parameters stays on its subject.
"""
