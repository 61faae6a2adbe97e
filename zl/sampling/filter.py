"""The filter of the repetition penalty: which tokens of the vocabulary a row has seen, in words of 32 bits. Two kinds.

exact   one bit a token: bit id % 32 of word id / 32
bloom   4 KiB whatever the vocabulary: 64 lines of 16 words. Each of four hashes puts 512 neighbouring ids into a line,
        in order but for a rotation within every word: the bitmap of the whole vocabulary takes four passes over words

Here is the contract, bit for bit; gpu/native/filter.cpp and gpu/kernels/ hold to it, and tests compare them.
State: none. Refuses torch, asyncio and net.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zl.errors import ShapeError

KINDS = ("exact", "bloom")

BLOOM_WORDS = 1_024
LINE = 16
"""Words of a line; a token keeps its place in the line, (id / 32) % LINE."""

HASHES = (0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xCC9E2D51)
"""Odd factors (of xxHash and MurmurHash3). The product with id / 512 + 1, modulo 2^32, gives the line by its upper six
bits and the rotation by the next five. Chosen, of the hashes' known factors, for this: in vocabularies up to 262,144 no
token's four bits coincide, and the rate of false positives is the textbook's for real, random and skewed sets."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A kind of filter over a vocabulary. Raises ShapeError for a kind that is none.

    A row's filter is uint32 [words]; ids outside the vocabulary are passed over.
    """

    kind: str
    vocab: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShapeError("penalty_filter", self.kind, "one of " + ", ".join(KINDS))

    @property
    def bloom(self) -> bool:
        """Tell whether it takes some tokens for seen that were not."""
        return self.kind == "bloom"

    @property
    def words(self) -> int:
        """Count the words of a row's filter."""
        return BLOOM_WORDS if self.bloom else self.bitmap_words

    @property
    def bitmap_words(self) -> int:
        """Count the words of a bitmap of the vocabulary."""
        return -(-self.vocab // 32)

    @property
    def note(self) -> str:
        """Give what a program's name says of the filter: nothing where it is exact."""
        return ", Bloom penalty filter" if self.bloom else ""

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Give the bits of token ids, int [n]: int64 [n, hashes], bit p % 32 of word p / 32."""
        ids = ids.astype(np.int64)[:, None]
        if not self.bloom:
            return ids
        lines, turns = _hash(ids // (32 * LINE))
        return 32 * (LINE * lines + ids // 32 % LINE) + (ids + turns) % 32

    def add(self, row: np.ndarray, ids: np.ndarray) -> None:
        """Add token ids, int [n], to a row's filter."""
        places = self.places(ids[(ids >= 0) & (ids < self.vocab)])
        np.bitwise_or.at(row, places >> 5, np.uint32(1) << (places & 31).astype(np.uint32))

    def bitmaps(self, rows: np.ndarray) -> np.ndarray:
        """Give rows' filters, uint32 [n, words], as bitmaps of the vocabulary, uint32 [n, bitmap_words].

        Bits of ids that the filter takes for seen; behind the vocabulary there are none.
        """
        if not self.bloom:
            return rows
        lines, turns = _hash(np.arange(-(-self.vocab // (32 * LINE)))[:, None])
        found = np.full((len(rows), len(lines), LINE), 0xFFFFFFFF, np.uint32)
        for line, turn in zip(lines.T, turns.T.astype(np.uint32)[..., None], strict=True):
            x = rows.reshape(len(rows), -1, LINE)[:, line]
            found &= x >> turn | x << (-turn & np.uint32(31))
        bits = found.reshape(len(rows), -1)[:, : self.bitmap_words].copy()
        if self.vocab % 32:
            bits[:, -1] &= np.uint32((1 << self.vocab % 32) - 1)
        return bits


def _hash(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash groups of 512 ids, int64 [n, 1]: lines and rotations, int64 [n, hashes]."""
    product = (groups + 1) * np.array(HASHES, np.int64) & 0xFFFFFFFF
    return product >> 26, product >> 21 & 31
