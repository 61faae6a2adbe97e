"""Answer from your own notes: Qdrant finds passages, the model sums them up, the summary is the answer's context.

Qdrant's client runs in local mode, inside this process: no server. The vectors are counts of hashed words, so that
the example needs no embedding model; put yours into `embed`. The context has one length whatever was found, which
keeps the prompt's length, and with it the time to the first token, the same for every question.

    pip install '.[examples]'
    python examples/rag_qdrant.py "When is the museum open?"
    python examples/rag_qdrant.py --notes notes.txt "What did we decide on Tuesday?"

A notes file has one passage a paragraph.
"""

from __future__ import annotations

import argparse
import math
import re
import zlib
from pathlib import Path

from qdrant_client import QdrantClient, models

from zl.client import Client
from zl.client.helpers import retrieval_segment

DIMENSIONS = 512
SUMMARY_TOKENS = 64
CONTEXT_BYTES = 400

NOTES = """\
The museum of clocks is open from Tuesday to Sunday, from ten in the morning to six in the evening. It is closed on
Mondays and on the first of January.

Tickets to the museum of clocks cost nine euros. Children under twelve and members of the society go in free.

The oldest clock of the collection is an iron tower clock of 1487. It was wound by hand every morning.

The cafe of the museum serves soup at noon. Its terrace looks onto the river.

The tram lines 3 and 11 stop in front of the museum. There is no parking place for cars.
"""


def embed(text: str) -> list[float]:
    """Count words into a fixed number of places, and scale to length 1."""
    vector = [0.0] * DIMENSIONS
    for word in re.findall(r"\w+", text.lower()):
        vector[zlib.crc32(word.removesuffix("s").encode()) % DIMENSIONS] += 1 / (1 + (len(word) < 4) * 4)
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def index(passages: list[str]) -> QdrantClient:
    """Put the passages into a collection in memory; QdrantClient(path="folder") would keep it on disk."""
    store = QdrantClient(":memory:")
    store.create_collection(
        "notes", vectors_config=models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
    )
    store.upsert(
        "notes",
        [models.PointStruct(id=i, vector=embed(text), payload={"text": text}) for i, text in enumerate(passages)],
    )
    return store


def retrieve(store: QdrantClient, question: str, n: int = 3) -> list[str]:
    """Find the passages nearest to a question, the best first."""
    found = store.query_points("notes", query=embed(question), limit=n)
    return [point.payload["text"] for point in found.points if point.payload]


def main() -> None:
    parser = argparse.ArgumentParser(description="answer a question from notes")
    parser.add_argument("question")
    parser.add_argument("--notes", type=Path)
    args = parser.parse_args()
    notes = args.notes.read_text("utf-8") if args.notes else NOTES
    store = index([" ".join(passage.split()) for passage in notes.split("\n\n") if passage.strip()])
    passages = retrieve(store, args.question)
    store.close()
    with Client() as client:
        # A summary of fixed length: of at most SUMMARY_TOKENS tokens, then cut or padded to CONTEXT_BYTES bytes.
        text = "\n".join(passages)
        summary = client.ask(f"Sum up: {text}", type="summarize", max_tokens=SUMMARY_TOKENS, seed=1).text
        context = retrieval_segment([summary, *passages], CONTEXT_BYTES)
        print(f"context, {len(context.encode())} bytes: {context.rstrip()}\n")
        with client.stream(args.question, context=context, max_tokens=96, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
