"""Long text with a fact to retrieve, and the options of the examples that ask for it."""

import argparse
import sys
from pathlib import Path

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
SCORER = Path(__file__).parent / "scorers" / "smollm2-135m-kvpop"


def parser_of(description: str, tokens: int, policies: list[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of both examples.

    Args:
        description: what the example does.
        tokens: default length of an answer.
        policies: names to choose from, None for any.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--policy", default="kvpop", choices=policies)
    parser.add_argument("--scorer", type=Path, default=SCORER, help="of the policy kvpop (default: the shipped one)")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--notes", type=int, default=150, help="lines of the text, about 30 tokens each")
    parser.add_argument("--tokens", type=int, default=tokens, help="longest answer")
    return parser


def finish(run, args: argparse.Namespace, errors: tuple[type[Exception], ...]) -> int:
    """Run an example. Return 0, 1 after an error, 2 if there is no model, or 130 after an interrupt."""
    if not (args.model / "config.json").is_file():
        print(f"no model in {args.model}: run `make model`, or give --model", file=sys.stderr)
        return 2
    try:
        run(args)
    except errors as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


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
