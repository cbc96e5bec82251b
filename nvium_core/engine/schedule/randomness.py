"""Random numbers of the engine. A number depends only on what it decides, not on the time or the batch."""

import secrets
import struct
from hashlib import blake2b
from typing import Literal

Purpose = Literal[b"route", b"token"]
ROUTE: Purpose = b"route"
TOKEN: Purpose = b"token"


def uniform(seed: int, choice: int, position: int, junction: int, purpose: Purpose) -> float:
    """Return a number in [0, 1) with 53 random bits.

    `position` is the front row, `junction` the 0-based exit. Routing and drawing a token use different numbers:
    otherwise exit and token would be correlated, and samples would be biased.
    """
    key = struct.pack("<qqqq", seed, choice, position, junction) + purpose
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def random_seed() -> int:
    return secrets.randbits(63)
