"""Generate synthetic stories ("tales") for training with a small instruction-tuned Llama.

    python -m research.tales tell MODEL FOLDER     # resumes if interrupted
    python -m research.tales pack FOLDER OUT.xz --words-from TEXT
    python -m research.tales ask TALES OUT.jsonl    # requests answered by tales

For each tale, a plot is sampled: hero, place, object, helper and twist. The prompt requests a story with this plot. The
first sentence of every part is forced, and the model generates the rest of the part. So even a model of 135M parameters
keeps to the subject.
"""
