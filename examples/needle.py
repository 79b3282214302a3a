"""Long text with a fact to retrieve."""

from __future__ import annotations


def question(notes: int) -> str:
    """Return a report of ``notes`` lines, with the fact near its end, followed by the question."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lines = [f"Note {i}: {filler}" for i in range(notes)]
    lines.insert(-3, "One of the special magic numbers for quokka is: 4719.")
    body = "\n".join(lines)
    return (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{body}\nWhat is the special magic number for quokka mentioned in the provided text?"
    )
