"""Plain text of the markup that demo texts come in: Perl's POD, and a book's HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser


def pod_text(source: str) -> str:
    """Plain text of Perl's documentation format: headings and items lose their command, codes their brackets."""
    out, skipped, inside = [], None, False
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", source.strip("\n")):
        command, _, rest = paragraph.partition(" ") if paragraph.startswith("=") else ("", "", paragraph)
        command, rest = command.split("\n")[0], rest.strip() if command else rest
        inside = (inside or bool(command)) and command != "=cut"
        if skipped or not inside:
            skipped = None if command == "=end" else skipped
        elif command == "=begin":
            skipped = rest
        elif command.startswith("=head") or command == "=item" or not command:
            out.append(paragraph.rstrip() if paragraph[:1].isspace() else pod_codes(rest).strip())
    return "\n\n".join(filter(None, out)) + "\n"


ENTITIES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"', "nbsp": " "}


OPEN = re.compile(r"([A-Z])(<<+\s+|<)")


def pod_codes(text: str) -> str:
    """``B<bold>``, ``C<< a > b >>``, ``L<text|page>`` and the like as plain text; nested ones too."""
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
                inner = ENTITIES.get(inner, chr(int(inner, 0)) if inner.isdigit() else inner)
            out.append("" if code in "XZ" else inner)
        else:
            out.append(text[i])
            i += 1
    return "".join(out), i


def html_text(source: str) -> str:
    """Plain text of a handbook page without its navigation."""
    page = _Page()
    page.feed(source)
    page.close()
    text = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", "".join(page.out))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Page(HTMLParser):
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "dt", "table", "tr", "pre"}
    EMPTY = {"meta", "link", "img", "br", "hr", "input", "col"}

    def __init__(self):
        super().__init__()
        self.out, self.skipping, self.verbatim = [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag in self.EMPTY:
            return
        given = dict(attributes)
        classes = (given.get("class") or "").split()
        navigation = given.get("id") in ("title", "banner") or {"docnav", "toc"} & set(classes)
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
        self.out.append(data)
