"""Print the tables of docs/models.md, and its estimate of copies: `python docs/models.py`. With `--write` the document gets the tables.

Families come from `kvpop_vllm/supported.py`. Memory is computed as by `kvpop plan`, from the published shapes in
docs/configs, cut to what `kvpop plan` reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvpop_vllm import plan
from kvpop_vllm.cli import make_parser
from kvpop_vllm.model_shape import positions_of, read_model_config, text_config
from kvpop_vllm.supported import FAMILIES, family_of

DOCUMENT = Path(__file__).with_suffix(".md")
CONFIGS = Path(__file__).parent / "configs"
LENGTHS, BUDGET, POLICY = (8_000, 32_000, 128_000), 2048, "kvpop"
BLOCK = 16
"""Tokens per block of stock vLLM, as on a GPU."""


def families() -> str:
    """Return the table of families."""
    lines = ["| family | model type | a policy acts on | state |", "|---|---|---|---|"]
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in family.model_types)
        state = family.state if family.served else f"refused: {family.state}"
        notes = [state, *([f"Refused: {family.limit}"] if family.limit else []), *filter(None, [family.read])]
        lines.append(f"| {family.name} | {types} | {family.layers} | {'. '.join(notes)} |")
    return "\n".join(lines)


def commands() -> str:
    """Return the commands that serve a model of each family, as a block of a document."""
    lines = [family.command for family in FAMILIES if family.served and family.model]
    return "\n".join(["```bash", *lines, "```"])


def planned(folder: Path, length: int) -> plan.Result:
    """Return what requests of ``length`` tokens of a model hold."""
    words = ["--kv-memory", "40GiB", "--budget", str(BUDGET), "--max-model-len", str(length)]
    words += ["--dense-block-size", str(BLOCK), "--model", str(folder)]
    return plan.compute(make_parser().parse_args(["plan", *words]))


def memory_row(folder: Path) -> str:
    """Return the row of a model; cells of texts that are longer than its positions are empty."""
    positions = positions_of(read_model_config(folder))
    results = [planned(folder, length) if length <= positions else None for length in LENGTHS]
    stock = [result and plan.size_text(result.stock.allocated) for result in results]
    ours = [result and plan.size_text(result.requests[POLICY, BUDGET].allocated) for result in results]
    return f"| {' | '.join([folder.name, *(cell or '-' for cell in (*stock, *ours))])} |"


def memory() -> str:
    """Return the table of memory of a request, in stock vLLM and with a policy."""
    lengths = [f"{length:,}" for length in LENGTHS]
    names = ["model", f"stock, {lengths[0]} tokens", *lengths[1:], f"`{POLICY}`, {lengths[0]} tokens", *lengths[1:]]
    families = {
        folder: family_of(text_config(read_model_config(folder)))
        for folder in sorted(CONFIGS.iterdir(), key=lambda path: path.name.lower())
    }
    served = [folder for folder, family in families.items() if family is None or family.served]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *map(memory_row, served)])


def copies() -> str:
    """Return what copies of a shared cache would cost in Gemma 4 E2B, as a sentence of the document.

    Of its 35 layers 7 have full attention with one KV head of 512, 4 of which read the cache of another. The others have
    one of 256 and windows of 512 tokens. A step reads 2.3 billion parameters. All are in two bytes.
    """
    full, window = 2 * 2 * 512 * BUDGET, 2 * 2 * 256 * 512

    def share(requests: int) -> float:
        read = 2 * 2.3e9 + requests * (7 * full + 28 * window)
        return 100 * requests * 4 * 2 * full / read  # each copy is written and read

    return f"By an estimate these copies, written and read, are {share(1):.1f}% of a step's bytes for one request and {share(64):.0f}% for 64."


def replaced(text: str, part: str) -> str:
    """Return a document in which a table or a block of commands has new contents; its first lines say which it is."""
    start = text.index(part.split("\n", 1)[0] + ("\nvllm serve" if part.startswith("```") else ""))
    end = text.index("\n```\n", start) + 4 if part.startswith("```") else text.index("\n\n", start)
    return text[:start] + part + text[end:]


def main() -> None:
    """Print the tables, or write them."""
    tables = [families(), commands(), memory()]
    if sys.argv[1:] != ["--write"]:
        print("\n\n".join([*tables, copies()]))
        return
    text = DOCUMENT.read_text()
    for part in tables:
        text = replaced(text, part)
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
