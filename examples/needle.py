"""A long text with something to be found in it."""

from __future__ import annotations


def question(notes: int) -> str:
    """A long report, much longer than the budget, with what is asked for near its end."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lines = [f"Note {i}: {filler}" for i in range(notes)]
    lines.insert(-3, "One of the special magic numbers for quokka is: 4719.")
    body = "\n".join(lines)
    return (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{body}\nWhat is the special magic number for quokka mentioned in the provided text?"
    )
