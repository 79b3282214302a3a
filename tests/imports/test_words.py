"""Names that are bare function words, words of prose, and patterns of documents only get fewer."""

import ast
from collections import Counter

import pytest
import words

PLAIN = "README.md", "CHANGELOG.md", "docs/policies.md", "docs/findings.md"
"""Documents that have none of the three words, and no pattern but semicolons."""


def test_counts_are_those_of_today_and_fall():
    now = Counter(key for key, *_ in words.uses())
    risen = {key: f"{words.COUNTS.get(key, 0)} to {now[key]}" for key in now if now[key] > words.COUNTS.get(key, 0)}
    assert not risen, f"say what it is, or use another word (`python tests/words.py WORD` lists the places): {risen}"
    fallen = {key: now[key] for key in words.COUNTS if now[key] < words.COUNTS[key]}
    assert not fallen, f"lower these counts in tests/words.py: {fallen}"


def test_new_documents_have_none_of_the_words():
    assert set(PLAIN) <= set(words.tracked("*.md"))
    uses = [(file, line, key) for key, file, line in words.uses() if file in PLAIN]
    assert [use for use in uses if use[2] != "pattern semicolon"] == []


def test_what_is_counted(tmp_path):
    """Variables, parameters and fields of every kind; docstrings and comments, but no strings and no names of tests."""
    source = '''"""It stands behind a module."""
class Kept:
    own: int
    """Beside a field."""
    def held(self, told, *, each=1, **given):
        self.made, _found = told, [whole for whole in given]
        with open("behind") as seen:  # written anew
            (known := 1)
        return seen
'''
    names = sorted(name for name, _ in words.bound_names(ast.parse(source)))
    assert names == ["each", "found", "given", "known", "made", "own", "seen", "told", "whole"]
    passages = [*words.docstrings(ast.parse(source)), *words.comments("a.py", source)]
    uses = [use for line, passage in passages for use in words.prose_uses(passage, line)]
    assert uses == [("behind", 1), ("beside", 4), ("anew", 7)]
    text = 'a = 1; // behind it\n/* one\n anew */\nb = "beside";\n'
    assert [line for line, _ in words.comments("a.cpp", text)] == [1, 2]
    assert [*words.prose_uses("one\n anew", 2)] == [("anew", 3)]


@pytest.mark.parametrize("name", words.PATTERNS)
def test_each_pattern_matches_its_example(name):
    """Across a line's end too, in no code, and not in the sentence that is better."""
    _, example, better = words.PATTERNS[name]
    assert [*words.pattern_uses(f"Once.\n\n{example}\n")] == [(name, 3)]
    assert [*words.pattern_uses(example.replace(" ", "\n", 2))][0][0] == name
    assert [*words.pattern_uses(f"```\n{example}\n```\n")] == [*words.pattern_uses(better)] == []
