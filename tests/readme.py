"""Parts of README.md and of other documents for tests: code blocks, code spans, commands, tables and sections."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = "kvpop", "vllm", "make", "python", "pip", "curl"
"""First words of commands."""


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language, ``""`` for those without one."""
    return [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if name == language]


def prose() -> str:
    """Return the text without code blocks, code spans, link targets and attributes that name files."""
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "", text)
    return re.sub(r"\]\([^)]*\)|(?:href|src)=\"[^\"]*\"", "]", text)


def spans() -> list[str]:
    """Return the code spans outside code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S))


def printed_commands() -> list[str]:
    """Return the commands of shell blocks as printed, a command that goes on over several lines as one text."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS]


def commands() -> list[list[str]]:
    """Return the words of all commands, of shell blocks and of code spans."""
    texts = [*printed_commands(), *(span for span in spans() if span.split()[0] in PROGRAMS and " " in span)]
    return [shlex.split(text, comments=True) for text in texts]


def table(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table whose first cell is ``heading``."""
    start = README.index(f"\n| {heading} |")
    lines = README[start + 1 : README.index("\n\n", start + 1)].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]


def headings(text: str) -> list[str]:
    """Return the headings of a document, without marks."""
    return re.findall(r"^#+ +(.*?) *$", text, flags=re.M)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(text: str, part: str) -> str:
    """Return the section of a document with an anchor and the sections within it, or the whole text for ``""``."""
    if not part:
        return text
    (heading,) = (line for line in headings(text) if anchor(line) == part)
    marks, body = re.search(rf"^(#+) +{re.escape(heading)} *\n(.*)", text, re.M | re.S).groups()
    return re.split(rf"^#{{1,{len(marks)}}} ", body, maxsplit=1, flags=re.M)[0]
