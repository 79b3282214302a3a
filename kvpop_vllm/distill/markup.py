"""Conversion of markup to plain text: Perl's POD, and the HTML of a book."""

from __future__ import annotations

import re
from html.entities import html5
from html.parser import HTMLParser


def pod_text(source: str) -> str:
    """Return the plain text of Perl's documentation format.

    Headings and items lose their command, formatting codes their brackets.
    """
    out, skipped, inside = [], False, False
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", source.strip("\n")):
        command, rest = re.match(r"(=[A-Za-z]\S*\s*)?(.*)", paragraph, re.DOTALL).groups()
        command = (command or "").strip()
        inside = (inside or bool(command)) and command != "=cut"
        if command in ("=begin", "=end"):
            skipped = command == "=begin"
        elif inside and not skipped and (command.startswith("=head") or command in ("=item", "")):
            out.append(rest.rstrip() if rest[:1].isspace() else pod_codes(rest).strip())
    return "\n\n".join(filter(None, out)) + "\n"


OPEN = re.compile(r"([A-Z])(<<+\s+|<)")


def pod_codes(text: str) -> str:
    """Return text with formatting codes as plain text: ``B<bold>``, ``C<< a > b >>``, ``L<text|page>``."""
    return _pod_codes(text, 0, None)[0]


def _pod_codes(text: str, i: int, close: re.Pattern | None) -> tuple[str, int]:
    out = []
    while i < len(text):
        if close and (end := close.match(text, i)):
            return "".join(out), end.end()
        if start := OPEN.match(text, i):
            code, brackets = start[1], len(start[2].strip())
            inner, i = _pod_codes(text, start.end(), re.compile(r"\s+" + ">" * brackets if brackets > 1 else ">"))
            if code == "L":
                inner = inner.partition("|")[0]
            elif code == "E":
                inner = _character(inner)
            out.append("" if code in "XZ" else inner)
        else:
            out.append(text[i])
            i += 1
    return "".join(out), i


def _character(name: str) -> str:
    """Return the character of ``E<name>``, or the name if it is unknown.

    The name is a number (``233``, ``0xE9``, ``0351``) or one of HTML's entities.
    """
    if not name[:1].isdigit():
        return html5.get(name + ";", name).replace("\N{NO-BREAK SPACE}", " ")
    base = 16 if name[:2].lower() == "0x" else 8 if name[0] == "0" else 10
    try:
        return chr(int(name, base))
    except (ValueError, OverflowError):
        return name


def html_text(source: str) -> str:
    """Return the plain text of a handbook page without its navigation."""
    page = _Page()
    page.feed(source)
    page.close()
    text = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", "".join(page.out))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Page(HTMLParser):
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "dt", "table", "tr", "pre"}
    EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

    def __init__(self):
        super().__init__()
        self.out, self.skipping, self.verbatim = [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag in self.EMPTY:
            return self.handle_startendtag(tag, attributes)
        attributes = dict(attributes)
        classes = (attributes.get("class") or "").split()
        navigation = attributes.get("id") in ("title", "banner") or {"docnav", "toc"} & set(classes)
        if self.skipping or navigation or tag in ("head", "script", "style"):
            self.skipping += 1
        elif tag in self.BLOCKS:
            self.out.append("\n\n")
        elif tag == "li":
            self.out.append("\n* ")
        self.verbatim += tag == "pre"

    def handle_startendtag(self, tag, attributes):
        if tag == "br" and not self.skipping:
            self.out.append("\n")

    def handle_endtag(self, tag):
        if tag in self.EMPTY:
            return
        self.verbatim -= tag == "pre"
        if self.skipping:
            self.skipping -= 1
        elif tag in self.BLOCKS:
            self.out.append("\n\n")

    def handle_data(self, data):
        if self.skipping:
            return
        if not self.verbatim:
            data = re.sub(r"\s+", " ", data)
            if not self.out or self.out[-1].endswith(("\n", "* ")):
                data = data.lstrip()
        if data:
            self.out.append(data)
