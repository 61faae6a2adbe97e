"""The requests of the load generators: the same bytes for the same seed. Owns no state; standard library only.

The words are common ones that the usual byte-level BPE vocabularies hold as one token each with their leading space, so
a text of n words is n tokens to within a few; the servers report what they counted and results keep it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDS: list[str] = (  # noqa: SIM905 (a list of 240 quoted words is no easier to read)
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education small large good new first last long great little own old "
    "big high different next early young important few public bad same able make know take see come think look want "
    "give use find tell ask seem feel try leave call keep let begin help show hear play run move like live believe "
    "hold bring happen write provide sit stand lose pay meet include continue set learn lead understand watch follow"
).split()

PROFILES = {"CHAT": (0.7, 0.95, 1.1), "SUMMARIZE": (0.3, 0.5, 1.0), "CREATIVE": (0.9, 0.99, 1.2)}
"""Temperature, top-p and repetition penalty that each request type stands for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: a conversation, how many tokens to make of it (never fewer: ignore_eos), and its type."""

    system: str
    messages: tuple[str, ...]
    max_tokens: int
    type: str = "CHAT"

    @property
    def sampling(self) -> tuple[float, float, float]:
        """Temperature, top-p, repetition penalty."""
        return PROFILES[self.type]

    def chat(self) -> list[dict[str, str]]:
        """Give the conversation in the shape of OpenAI's API."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        roles = ("user", "assistant")
        return turns + [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.messages)]


def text(n_words: int, seed: int) -> str:
    """Draw a text of n words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


SYSTEM = "You are a helpful assistant."


def burst(n: int, tokens: int, seed: int, words: int = 60, system: str = SYSTEM) -> list[Prompt]:
    """Make n different prompts; another seed gives others, so that no round is served from the last one's caches."""
    return [Prompt(system, (text(words, seed * 100_003 + i),), tokens) for i in range(n)]


def shared(n: int, tokens: int, seed: int, system_words: int = 400) -> list[Prompt]:
    """Make n prompts under one system prompt of 400 tokens, which is the same in all rounds: it may stay warm."""
    return burst(n, tokens, seed, system=text(system_words, 0))


def mixed(path: Path, n: int) -> list[Prompt]:
    """Read the conversations of a JSONL file, in order and over again until there are n, with their own lengths.

    Raises  ValueError: the file is empty
    """
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not records:
        raise ValueError(f"{path} has no prompts")
    picked = [records[i % len(records)] for i in range(n)]
    return [Prompt(r.get("system", ""), tuple(r["messages"]), r["max_tokens"], r.get("type", "CHAT")) for r in picked]
