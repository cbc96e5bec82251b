"""Generate synthetic stories ("tales") for training with a small instruction-tuned Llama.

    python -m research.tales tell MODEL FOLDER     # resumes
    python -m research.tales pack FOLDER OUT.xz --words-from TEXT
    python -m research.tales --help    # vary, ask and instruct turn tales into training data

A plot is sampled (hero, place, object, helper, twist), and the prompt requests its story. The first sentence of every
part is forced, and the model generates the rest. So even a model of 135M parameters keeps to the subject.
"""
