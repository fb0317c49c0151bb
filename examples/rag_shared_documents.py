"""Retrieval over shared documents, so built that prompts about the same documents share a prefix.

    python examples/rag_shared_documents.py --url http://127.0.0.1:8000

A retriever ranks documents by how well they match, and the rank differs from question to question. A prompt in that
order shares little with others over the same documents. A prompt in *one* order, such as by name, is the same up to the
question, and the cell computes the documents once. The questions are asked in both ways, under a salt each, so that
neither profits from the other. To take it over into LangChain: sort what a retriever returns before the prompt is made.
"""

from __future__ import annotations

import argparse
import re
import secrets
import time
from dataclasses import dataclass
from statistics import median

from openai import OpenAI


@dataclass(frozen=True)
class Document:
    """What a store of documents holds."""

    name: str
    text: str


FILLER = "Staff keep the records of this site in the archive, and an inspector reads them at the end of each year. " * 6
DOCUMENTS = [
    Document("clinic", f"The clinic in Braxol has 42 beds. Its access code is 4821. {FILLER}"),
    Document("harbour", f"The harbour in Braxol has 17 cranes. Its radio channel is 12. {FILLER}"),
    Document("mill", f"The mill in Tavik has 3 wheels. Its output is 905 sacks. {FILLER}"),
    Document("observatory", f"The observatory in Tavik has 2 domes. Its height is 1840 metres. {FILLER}"),
]
QUESTIONS = [
    "How many beds has the clinic, and which radio channel the harbour in Braxol?",
    "Which radio channel has the harbour, and what is its number of cranes, and which clinic is in Braxol?",
    "What is the access code of the clinic in Braxol?",
    "How many cranes has the harbour in Braxol?",
]


class Retriever:
    """Ranks documents by the words that they share with a question; a vector store would stand here."""

    def __init__(self, documents: list[Document]) -> None:
        self._words = [(document, words_of(document.text)) for document in documents]

    def best(self, question: str, count: int = 2) -> list[Document]:
        """The ``count`` best documents, the best first."""
        asked = words_of(question)
        ranked = sorted(self._words, key=lambda entry: -sum(word in entry[1] for word in asked))
        return [document for document, _ in ranked[:count]]


def words_of(text: str) -> list[str]:
    """Words in lower case, repetitions included: what is named twice matters twice."""
    return re.findall(r"[a-z]{4,}", text.lower())


def prompt_of(documents: list[Document], question: str) -> str:
    """Documents first, the question last. Nothing that changes, such as a date, stands before the documents."""
    shared = "".join(f"[{document.name}]\n{document.text}\n\n" for document in documents)
    return f"{shared}Question: {question}\nAnswer:"


def ask(client: OpenAI, model: str, prompt: str, salt: str) -> tuple[int, int, float]:
    """Prompt tokens, cached ones among them, and milliseconds to the first token."""
    started = time.perf_counter()
    first_ms = 0.0
    usage = None
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt},
    ):
        first_ms = first_ms or (time.perf_counter() - started) * 1000
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, first_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--api-key", default="none", help="where the cell has tenants")
    options = parser.parse_args()
    retriever = Retriever(DOCUMENTS)
    with OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        for order in ("by rank", "by name"):
            salt = secrets.token_hex(8)
            answers = []
            for question in QUESTIONS:
                documents = retriever.best(question)
                if order == "by name":
                    documents = sorted(documents, key=lambda document: document.name)
                tokens, cached, first_ms = ask(client, model, prompt_of(documents, question), salt)
                names = ", ".join(document.name for document in documents)
                print(f"{order} ({names}): {cached} of {tokens} prompt tokens cached, {first_ms:.0f} ms to the first")
                answers.append((cached, first_ms))
            total = sum(cached for cached, _ in answers)
            typical = median(first_ms for _, first_ms in answers)
            print(
                f"documents {order}: {total} tokens cached in all, {typical:.0f} ms to the first token in the median\n"
            )


if __name__ == "__main__":
    main()
