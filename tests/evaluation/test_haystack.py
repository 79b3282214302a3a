"""Replay rows begin at the start of documents; sentences lose no word."""

import json

import pytest
from distill.tiny_text import VOCABULARY

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.splits import in_split, share_of
from kvpop_vllm.evaluation.haystack import LONGEST_SENTENCE, documents, replay_rows, rows_in_turn, sentences, units_of


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(path)]


def rows(paths, tokenizer, length, split="all", seed=0):
    replayed = replay_rows(paths, tokenizer, length, split=split, seed=seed, vocab_size=VOCABULARY)
    return [tokenizer.decode(row.tokens) for row in replayed]


def test_rows_begin_with_documents_and_go_on_with_the_next(tokenizer, tmp_path):
    texts = [chr(97 + i) * n for i, n in enumerate((30, 12, 95, 7, 40, 8))]
    paths = write(tmp_path / "text.jsonl", texts)
    for seed in range(4):
        texts_of_rows = rows(paths, tokenizer, 32, seed=seed)
        order = [c for row in texts_of_rows for c in dict.fromkeys(row.replace("<end>", ""))]
        assert len(order) == len(set(order)) and all(len(tokenizer(row)["input_ids"]) == 32 for row in texts_of_rows)
        for row in texts_of_rows:
            sentences = row.split("<end>")
            assert all(part in texts for part in sentences[:-1]), "only the last document of a row is cut"
            assert any(text.startswith(sentences[-1]) for text in texts)
    assert len({tuple(rows(paths, tokenizer, 32, seed=seed)) for seed in range(4)}) > 1
    assert rows(paths, tokenizer, 32, seed=2) == rows(paths, tokenizer, 32, seed=2)
    assert rows(paths, tokenizer, 32000) == []


def test_rows_name_their_documents_and_units_share_groups_and_texts(tokenizer, tmp_path):
    """Rows that share a group or a text, also through other rows, are one unit."""
    groups = ["a", None, "b", "c", None, "a", None, "d", "c", None, None, None]
    texts = [chr(97 + i) * 12 for i in range(12)]
    texts[11] = texts[1]
    path = tmp_path / "text.jsonl"
    lines = [{"text": text} | ({"group": group} if group else {}) for text, group in zip(texts, groups, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed in range(5):
        replayed = list(replay_rows([str(path)], tokenizer, 26, split="all", seed=seed, vocab_size=VOCABULARY))
        numbers = [[int(document.rpartition(":")[2]) - 1 for document in row.documents] for row in replayed]
        assert sorted(sum(numbers, [])) == list(range(12)) and all(len(pair) == 2 for pair in numbers)
        keys = [{groups[i] or texts[i] for i in pair} for pair in numbers]
        units = units_of(replayed)
        for one in range(6):
            reached, before = keys[one], None
            while reached != before:
                before, reached = reached, set().union(reached, *(key for key in keys if key & reached))
            assert units[one] == next(i for i, key in enumerate(keys) if key & reached), seed


def test_texts_take_turns(tokenizer, tmp_path):
    paths = [
        write(tmp_path / f"{name}.jsonl", [name * 40] * count)[0] for name, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    mixed = rows_in_turn(replay_rows, [*paths, paths[0]], tokenizer, 30, split="all", seed=0, vocab_size=VOCABULARY)
    assert "".join(tokenizer.decode(row.tokens)[0] for row in mixed) == "abcaca"


def test_a_split_holds_its_documents(tokenizer, tmp_path):
    texts = [f"document {i} " * 5 for i in range(200)]
    paths = write(tmp_path / "text.jsonl", texts)
    contents = [document.content for document in documents(paths, "test")]
    assert 0 < len(contents) < 40 and contents == [
        text for text in texts if in_split(share_of(text), "test", 0.05, 0.05)
    ]
    assert sentences(paths, "test", 1) == [" ".join(text.split()) for text in contents]


def test_sentences_are_short_and_lose_nothing(tmp_path):
    long = " ".join(f"word{i}" for i in range(300))
    paths = write(tmp_path / "text.jsonl", ["One is here. Is two? Yes!\nThree\n\n", long, "x" * 1000])
    split = sentences(paths, "all", 1)
    assert split[:4] == ["One is here.", "Is two?", "Yes!", "Three"]
    assert " ".join(split) == f"One is here. Is two? Yes! Three {long} {'x' * 1000}"
    assert all(len(sentence) <= LONGEST_SENTENCE for sentence in split[:-1])
    with pytest.raises(ConfigError, match="the train split of .*text.jsonl holds no text"):
        sentences(write(tmp_path / "text.jsonl", [" "]), "train", 1)


def test_conversations_are_text_too(tokenizer, tmp_path):
    path = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "content": "What now?"}, {"role": "assistant", "content": "Nothing. Wait."}]
    path.write_text(json.dumps({"messages": turns}))
    assert sentences([str(path)], "all", 1) == ["What now?", "Nothing.", "Wait."]
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    assert rows([str(path)], tokenizer, 20) == ["<user>What now?<assistant>"[:20]]
