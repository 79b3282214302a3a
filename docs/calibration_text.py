"""Make the text of `kvpop calibrate`: 36 documents of prose, code and chat from Python's manual and library.

The prose is of the tutorial and the how-tos, the code is of the standard library, and each chat is of questions and
answers of the FAQ. All of it has Python's licence (PSF-2.0), which is written next to the text.

    python docs/calibration_text.py kvpop_vllm/calibrate
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvpop_vllm.distill.texts import PYTHON, Package, decode, download, read_package
from kvpop_vllm.files import write_whole

LIBRARY = Package("libpython3.11-stdlib", None, "")
SIZE = 8400
"""Characters of a document."""
PROSE = (
    "tutorial/classes tutorial/controlflow tutorial/datastructures tutorial/errors tutorial/modules howto/sockets"
    " howto/functional howto/unicode howto/logging howto/descriptor howto/regex howto/pyporting"
).split()
CODE = "bdb dataclasses difflib fractions ftplib gzip mailbox pprint shutil socketserver statistics tarfile".split()
FAQ = "programming design library general".split()
CHATS = 12


def plain(text: str) -> str:
    """Return reStructuredText without its roles, targets and directives."""
    text = re.sub(r":[a-z:]+:`~?!?([^`<]+?)(?: <[^`]*>)?`", r"`\1`", text)
    text = re.sub(r"^\.\. [^\n]*\n(?:[ \t]+:[^\n]*\n)*", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text.replace("``", "`")).strip()


def cut(text: str) -> str:
    """Return the first characters of a text, up to the end of a line."""
    return text[: text.rfind("\n", 0, SIZE)]


def questions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the questions of a FAQ with their answers."""
    sections = re.split(r"^(.+)\n-{4,}\n", text, flags=re.MULTILINE)
    for question, answer in zip(sections[1::2], sections[2::2], strict=True):
        answer = plain(re.sub(r"^.+\n={4,}\n", "", answer, flags=re.MULTILINE))
        if question.endswith("?") and len(answer) > 100:
            yield plain(question), answer


def chats(pages: dict[str, str]) -> Iterator[list[dict]]:
    """Yield conversations of consecutive questions."""
    messages = []
    for name in FAQ:
        for question, answer in questions(pages[f"faq/{name}"]):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            room = SIZE - sum(len(message["content"]) for message in messages[:-1])
            if room < len(answer):
                messages[-1]["content"] = answer[: max(answer.rfind("\n", 0, room), 100)]
                yield messages
                messages = []


def main(folder: str) -> None:
    """Write the text and its licence."""
    with tempfile.TemporaryDirectory() as scratch:
        manual = list(read_package(download(PYTHON, Path(scratch))))
        library = dict(read_package(download(LIBRARY, Path(scratch))))
    sources = {
        match[1]: decode(data) for path, data in manual if (match := re.search(r"_sources/(.*)\.rst\.txt$", path))
    }
    modules = {
        path.rsplit("/", 1)[1]: decode(data)
        for path, data in library.items()
        if re.search(r"python3.11/[a-z]+\.py$", path)
    }
    records = [{"text": cut(plain(sources[name])), "group": f"prose: {name}"} for name in PROSE]
    records += [{"text": cut(modules[f"{name}.py"]), "group": f"code: {name}.py"} for name in CODE]
    talks = [messages for _, messages in zip(range(CHATS), chats(sources), strict=False)]
    records += [{"messages": messages, "group": f"chat: FAQ {i}"} for i, messages in enumerate(talks, 1)]
    turns = zip(
        records[: len(PROSE)], records[len(PROSE) :][: len(CODE)], records[len(PROSE) + len(CODE) :], strict=True
    )
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for turn in turns for record in turn]
    write_whole(Path(folder) / "text.jsonl", "".join(lines))
    licence = next(decode(data) for path, data in manual if path.endswith("/copyright"))
    begin, end = licence.index("PYTHON SOFTWARE FOUNDATION LICENSE"), licence.index("BEOPEN.COM LICENSE")
    heading = "text.jsonl holds parts of Python's documentation and standard library. Its licence:\n\n"
    write_whole(Path(folder) / "text.LICENSE", heading + licence[begin:end].rstrip("- \n") + "\n")
    print(f"{len(lines)} documents, {sum(map(len, lines))} characters")


if __name__ == "__main__":
    main(*sys.argv[1:])
