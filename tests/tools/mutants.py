"""Damaged streams, the same ones for each seed: cut, flipped, spliced, and with lengths made to fit or not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_SPITEFUL = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x12, 0x13, 0x14, 0x16, 0x18, 0x30, 0x3A)


def mutants(streams: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Give `count` streams, each made of one of `streams` by one to four mutations."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(streams))
        for _ in range(rng.randint(1, 4)):
            mutate(data, rng, streams)
        if rng.random() < 0.6 and len(data) > 4:
            # Most damage would otherwise end at the frame's length and never reach the payload.
            data[:4] = (len(data) - 4).to_bytes(4, "big")
        yield bytes(data)


def mutate(data: bytearray, rng: random.Random, streams: Sequence[bytes]) -> None:
    """Damage a stream in one place."""
    at = rng.randrange(len(data) + 1)
    stop = min(len(data), at + rng.randint(1, 12))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice(_SPITEFUL)
        case 2:
            del data[at:stop]
        case 3:
            data[at:at] = rng.randbytes(rng.randint(1, 6))
        case 4:
            data[at:at] = data[at:stop] * rng.randint(1, 3)
        case 5:
            del data[at:]
        case 6:
            data[at:at] = bytes([rng.choice(_SPITEFUL)]) * rng.randint(1, 11)
        case _:
            other = rng.choice(streams)
            cut = rng.randrange(len(other) + 1)
            data[at:] = other[cut:]
