"""Every random number the engine uses: a pure function of what is decided, not of when or in which batch."""

import secrets
import struct
from hashlib import blake2b
from typing import Literal

Purpose = Literal[b"route", b"token"]
ROUTE: Purpose = b"route"
TOKEN: Purpose = b"token"


def uniform(seed: int, choice: int, position: int, junction: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits.

    `position` is that of the front row, `junction` the 0-based exit it stands at. Routing and token have
    numbers of their own: sharing one would correlate depth and word and bias the draw.
    """
    key = struct.pack("<qqqq", seed, choice, position, junction) + purpose
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def random_seed() -> int:
    """A random seed for a request without one."""
    return secrets.randbits(63)
