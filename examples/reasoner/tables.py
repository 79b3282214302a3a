"""Tables of a comparison from its records."""

import csv
import sys
from pathlib import Path
from statistics import fmean

import contenders

from kvpop_vllm.evaluation.output import markdown_table, read_records
from kvpop_vllm.evaluation.runner import DENSE, OWN
from kvpop_vllm.evaluation.statistics import INTERVAL
from kvpop_vllm.evaluation.summaries import REASONING_COLUMNS, summarise_reasoning

MEASURES = {
    "exact": "exact answers",
    "before_error": "share of a solution before its first error",
    "of dense": "exact answers over those of the dense model",
    "fewer bytes": "bytes of a dense request over those of a request, prompts included",
}
"""Measures of the summary."""
TRAINED_WITH = "trained with shares of"
"""Words in the name of a policy that was trained with the shares of a compression, before the compression."""


def write_tables(folder: Path, suffix: str, against: str) -> None:
    """Write the tables of all records of test problems.

    Args:
        folder: folder of the comparison.
        suffix: of the names of tables and of the folder of records, which says what problems they are of.
        against: policy that differences are from. Without records of its own it is the one that was trained with
            shares.
    """
    records, compressions = records_of(folder / f"records{suffix}")
    if not records:
        sys.exit(f"{folder / f'records{suffix}'} has no records: name another folder, or leave --tables out")
    names = sorted({record["policy"] for record in records})
    with_shares = (name for name in names if name.startswith(f"{against}, {TRAINED_WITH}"))
    if against not in names:
        against = next(with_shares, against)
    if against not in names:
        print(f"no differences: {against} has no records")
    table, summaries, answers = (
        folder / f"{stem}{suffix}{ending}"
        for stem, ending in (("table", ".md"), ("summary", ".md"), ("answers", ".csv"))
    )
    table.write_text(markdown_table(summarise_reasoning(records, against), REASONING_COLUMNS))
    pooled = [record | {"kind": "all", "unit": f"{record['kind']} {record['unit']}"} for record in records]
    curves = curves_of(summarise_reasoning(pooled, against), compressions)
    measures = MEASURES | {"difference": f"exact answers less those of {against}, of the same problems"}
    measured = {name for curve in curves.values() for line in curve.values() for name in line}
    tables = [
        f"{title.capitalize()}:\n\n{summary(curves, value)}" for value, title in measures.items() if value in measured
    ]
    repeated = {record["policy"] for record in pooled if record.get("training")}
    of_seeds = [
        record | {"policy": f"{record['policy']}, seed {record['training']}", "training": 0}
        for record in pooled
        if record["policy"] in repeated
    ]
    if of_seeds:
        curves_of_seeds = curves_of(summarise_reasoning(of_seeds), compressions)
        tables.append(f"Exact answers of each training:\n\n{summary(curves_of_seeds, 'exact')}")
    summaries.write_text("\n".join(tables))
    write_answers(answers, curves)
    print(f"{folder} holds {summaries.name}, {table.name}, {answers.name}")


def records_of(folder: Path) -> tuple[list[dict], dict[int, int]]:
    """Return the records of test problems in a folder, and the compression of each budget.

    A trained policy has the name of its records.
    """
    records, dense, compressions, files = [], set(), {}, {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith("windows-"):
            continue
        shares = contenders.SHARES.fullmatch(path.stem)
        trained = contenders.VARIANT.fullmatch(shares[1] if shares else path.stem)
        is_trained = trained["policy"] in contenders.TRAINED
        about, of_file = read_records(path)
        options = about.get("options", {})
        budgets = sorted({record["budget"] for record in of_file if "budget" in record}, reverse=True)
        shares_of_length = sorted(options.get("share") or ())
        if budgets and len(budgets) != len(shares_of_length):
            sys.exit(f"{path} does not say by --share what its budgets are: remove it")
        compression = dict(zip(budgets, shares_of_length, strict=False))
        # without a teacher the dense model of a file is the one that the policy runs in
        trains_base = is_trained and contenders.trains_base(trained["policy"])
        for record in of_file:
            is_base = trains_base and options.get("teacher") is None and record["policy"] == DENSE
            policy = OWN if is_base else record["policy"]
            name = trained["policy"] if is_trained or shares else policy
            name += f", {TRAINED_WITH} {trained['shares']} times" if trained["shares"] else ""
            unevicted = f"{name}, nothing evicted"
            name += ", shares" if shares and not trained["shares"] else ""
            name = {DENSE: DENSE, OWN: unevicted}.get(policy, name)
            if is_trained and policy != DENSE:
                record["training"] = int(trained["seed"] or 0)
            if "budget" in record:
                compressions[record["budget"]] = compression[record["budget"]]
                setting = name, record.get("training"), record["kind"], record["budget"], record["equal"]
                if (earlier := files.setdefault(setting, path)) != path:
                    sys.exit(
                        f"{path} and {earlier.name} both have {name} at a budget of {record['budget']}: remove one"
                    )
            else:  # several commands may have solved the problems with a dense model
                solution = name, record["kind"], record["unit"], record.get("sample"), record.get("training")
                if solution in dense:
                    continue
                dense.add(solution)
            records.append(record | {"policy": name})
    return records, compressions


def curves_of(table: list[dict], compressions: dict[int, int]) -> dict[tuple[str, str], dict[int, dict]]:
    """Return the lines of a table by policy and equality, then by compression; dense models compress by 1.

    Args:
        table: from :func:`summarise_reasoning`.
        compressions: compression of each budget.
    """
    curves: dict[tuple[str, str], dict[int, dict]] = {}
    for line in table:
        key = line["policy"], line["equal"] or ""
        curves.setdefault(key, {})[compressions.get(line["budget"], 1)] = line
    dense = next((line["MiB"] for line in table if line["policy"] == DENSE), None)
    for line in table if dense else ():
        line["fewer bytes"] = dense / line["MiB"]
    return curves


def compressions_of(curves: dict[tuple[str, str], dict[int, dict]]) -> list[int]:
    """Return the compressions of all curves in ascending order, without dense's."""
    return sorted({c for curve in curves.values() for c in curve} - {1})


def summary(curves: dict[tuple[str, str], dict[int, dict]], value: str) -> str:
    """Return a Markdown table of a measure with its intervals: policies down, compressions across."""
    times = {1: "all held"} | {c: f"{c} times less" for c in compressions_of(curves)}

    def order(key: tuple[str, str]) -> tuple[bool, float]:
        return 1 not in curves[key], -fmean(line[value] for line in curves[key].values() if value in line)

    lines = []
    for key in sorted((key for key in curves if any(value in line for line in curves[key].values())), key=order):
        lines.append({"policy": key[0], "equal": key[1]})
        for c, line in curves[key].items():
            if value in line:
                ends = line.get(value + INTERVAL)
                lines[-1][times[c]] = f"{line[value]:.2f}" + (" ({:.2f} to {:.2f})".format(*ends) if ends else "")
    return markdown_table(lines, ("policy", "equal", *times.values()))


def write_answers(path: Path, curves: dict[tuple[str, str], dict[int, dict]]) -> None:
    """Write the share of exact answers, with its interval, of each policy and compression as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("policy", "equal", "compression", "problems", "exact", "low", "high"))
        for (policy, equal), curve in sorted(curves.items()):
            for compression, line in sorted(curve.items()):
                interval = line.get(f"exact{INTERVAL}", (line["exact"],) * 2)
                shares = (f"{share:.4f}" for share in (line["exact"], *interval))
                writer.writerow((policy, equal, compression, line["problems"], *shares))
