"""Tries a tokenizer.json in a helper process: encoding may crash the process, or take unlimited time or memory."""

import hashlib
import json
from collections.abc import Iterable
from multiprocessing.connection import Connection

from tokenizers import Tokenizer

from nvium_core.text.sandbox import Helper, HelperLost, limit_cpu_time, limit_memory

MAX_SECONDS = 10
MAX_BYTES = 2**30
MAX_REASON_CHARACTERS = 200

TEXTS = ("", "Once  upon a time,\n\n\tthere were 1,234 foxes. <s>[b] é e\u0301 日本語 👩\u200d🚀 \u0378\ufffd\x00")
"""Texts to try: an empty text, which gets the special tokens only, and characters that few vocabularies contain."""

PASSED = set[bytes]()  # digests of messages whose trials succeeded


def try_tokenizer(serialized: str, texts: Iterable[str] = ()) -> None:
    """Encode and decode `TEXTS` and these texts. Raise `ValueError` on failure. A success is remembered."""
    message = json.dumps([serialized, *TEXTS, *texts]).encode()
    if (digest := hashlib.sha256(message).digest()) in PASSED:
        return
    try:
        error = Helper.spawn(f"{__name__}:serve").ask(message).decode()
    except HelperLost as lost:
        raise ValueError(f"encoding a text crashes, or exceeds {MAX_SECONDS} s or {MAX_BYTES >> 20} MB") from lost
    if error:
        raise ValueError(error)
    PASSED.add(digest)


def serve(pipe: Connection) -> None:
    limit_memory(MAX_BYTES)
    message = pipe.recv_bytes()
    limit_cpu_time(MAX_SECONDS)
    pipe.send_bytes(error_of(*json.loads(message)).encode())


def error_of(serialized: str, *texts: str) -> str:
    """Return the error of the trial. It is empty if there is none."""
    try:
        tokenizer = Tokenizer.from_str(serialized)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if not tokenizer.get_vocab_size():
            return "model.vocab: is empty"
        for text in texts:
            tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    except BaseException as error:  # a panic in Rust is not an `Exception`
        place = "model.unk_token: " if "unk" in str(error).lower() else ""
        return f"{place}{error}"[:MAX_REASON_CHARACTERS]
    return ""
