"""Tables of the records of an evaluation: a line for each length, budget, equality, policy and kind of question."""

import math
from collections.abc import Iterator

from kvpop_vllm.evaluation import reasoning, replay, retrieval
from kvpop_vllm.evaluation.runner import DENSE, RECALL
from kvpop_vllm.evaluation.statistics import estimate

KEYS = ("length", "budget", "equal", "window", "topk", "policy")
"""Fields that identify a line of a table."""
SETTING = ("length", "budget", "equal", "MiB", "window", "topk", "policy", "rows")
NATS = ("kl", "kl ratio", "gap ratio", "perplexity")
TEXT_COLUMNS = (*SETTING, *RECALL, "error", *NATS, "accuracy")
RETRIEVAL_COLUMNS = (*SETTING[:-1], "kind", "examples", *retrieval.MEASURES)
REASONING_COLUMNS = (
    *SETTING[:-1],
    "kind",
    "problems",
    "trainings",
    "samples",
    "exact",
    "of dense",
    "difference",
    *reasoning.MEASURES[1:],
)
REPLAY_COLUMNS = (*SETTING, *NATS, "kl, all held", "kl, last quarter", "agreement")


def summarise_text(records: list[dict], against: str | None = None) -> list[dict]:
    """Return the table of records of `kvpop eval --task text`: means over rows, and nats (:func:`_nats`)."""
    table = []
    for line, members in _lines(records):
        for name in ("accuracy", *RECALL, "error"):
            # a measure that some rows lack has no mean over all
            if all(name in member for member in members):
                line[name] = _mean([m[name] for m in members])
        table.append(line | _nats(line, members, records, against))
    return table


def summarise_replay(records: list[dict], against: str | None = None) -> list[dict]:
    """Return the table of records of `kvpop eval --task replay`: means over rows, and nats (:func:`_nats`).

    ``kl, all held`` is the mean of the buckets that end before anything is evicted, ``kl, last quarter`` that
    of the buckets that begin in the last quarter of the row. ``*_by_position`` are means over rows.
    """
    table = []
    for line, members in _lines(records):
        curves = {}
        for name in (f"{measure}_by_position" for measure in replay.MEASURES):
            curves[name] = [_mean(part) for part in zip(*(m[name] for m in members), strict=True)]
        bucket, kl = members[0]["bucket"], curves["kl_by_position"]
        # only whole buckets in which nothing can have been evicted
        early = [x for i, x in enumerate(kl) if (i + 1) * bucket <= members[0].get("whole", 0)]
        late = [x for i, x in enumerate(kl) if i * bucket >= 0.75 * (line["length"] - 1)]
        line |= {"bucket": bucket, "agreement": _mean([m["agreement"] for m in members])} | curves
        if line["budget"]:
            line |= {"kl, all held": _mean(early) if early else None, "kl, last quarter": _mean(late) if late else None}
        table.append(line | _nats(line, members, records, against))
    return table


def summarise_retrieval(records: list[dict]) -> list[dict]:
    """Return the table of records of `kvpop eval --task retrieval`: means over the examples of each kind."""
    table = []
    for line, members in _lines(records, (*KEYS, "kind")):
        line["examples"] = line.pop("rows")
        for name in retrieval.MEASURES:
            line |= estimate(name, [m[name] for m in members], units=[m["unit"] for m in members], shares=True)
        table.append(line)
    return table


def summarise_reasoning(records: list[dict], against: str | None = None) -> list[dict]:
    """Return the table of records of `kvpop eval --task reasoning`: means over the problems of each kind.

    A problem counts with the mean of its samples and draws. ``of dense`` is exact answers over those of the dense
    model, ``difference`` exact answers less those of the reference. Records may be of several trainings of a policy,
    named by ``training``. Intervals then draw trainings and problems. ``topk`` and ``MiB`` are means, since trainings with
    other shares of heads may have other slots in as many bytes.
    """
    table, keys = [], (*(name for name in KEYS if name != "topk"), "kind")
    groups = {tuple(line[name] for name in keys): (line, members) for line, members in _lines(records, keys)}
    exact = {key: _by_problem(members, "exact") for key, (_, members) in groups.items()}
    for key, (line, members) in groups.items():
        problems, trainings = zip(*exact[key], strict=True)
        draws = {"units": problems, "trainings": trainings}
        line["topk"] = line["budget"] and round(_mean([member["topk"] for member in members]))
        line |= {"problems": len(set(problems)), "samples": line.pop("rows") // len(problems)}
        if len(set(trainings)) > 1:
            line["trainings"] = len(set(trainings))
        for name in ("exact", "right", "before_error"):
            line |= estimate(name, list(_by_problem(members, name).values()), **draws, shares=True)
        line |= {name: _mean([m[name] for m in members]) for name in ("answered", "written")}
        for rival, answers in exact.items():
            name, kind = groups[rival][0]["policy"], groups[rival][0]["kind"]
            if kind != line["kind"] or not line["budget"] or name not in (DENSE, against):
                continue
            pairs, draws = _paired(exact[key], answers)
            if name == DENSE:
                line |= estimate("of dense", *pairs, **draws)
            # the reference has no difference from itself
            elif name != line["policy"] and _setting_of(groups[rival][0]) == _setting_of(line):
                line |= estimate("difference", [a - b for a, b in zip(*pairs, strict=True)], **draws)
        table.append(line)
    return table


def _by_problem(records: list[dict], name: str) -> dict[tuple, float]:
    """Return the mean of a measure over the records of each problem and training, in this order."""
    values: dict[tuple, list[float]] = {}
    for record in records:
        # samples of one problem are not independent
        values.setdefault((record["unit"], record.get("training", 0)), []).append(float(record[name]))
    return {problem: _mean(of_problem) for problem, of_problem in values.items()}


def _paired(
    answers: dict[tuple, float], reference: dict[tuple, float]
) -> tuple[tuple[list[float], list[float]], dict[str, list]]:
    """Return values of the same problems and trainings of a policy and of its reference, and the problems and trainings.

    A side with one training has it in each of the other side's. Of several, those count that both have.
    """
    problems = list(dict.fromkeys(unit for unit, _ in answers))
    trained = [sorted({training for _, training in side}) for side in (answers, reference)]
    shorter, longer = sorted(trained, key=len)
    numbers = longer if len(shorter) == 1 else [number for number in shorter if number in longer]
    keys = [(unit, number) for number in numbers for unit in problems]
    pairs = tuple(
        [side[unit, number if len(seeds) > 1 else seeds[0]] for unit, number in keys]
        for side, seeds in zip((answers, reference), trained, strict=True)
    )
    return pairs, {"units": [unit for unit, _ in keys], "trainings": [number for _, number in keys]}


def _nats(line: dict, members: list[dict], records: list[dict], against: str | None) -> dict:
    """Return a line's measures in nats, with intervals over units if there are enough of them.

    Args:
        line: identifies the policy. See :data:`KEYS`.
        members: its records, one per row.
        records: all records, among them those of the dense model and of the reference on the same rows.
        against: name of the reference policy, or None.

    Returns:
        ``perplexity``, and ``kl``, the divergence from dense in nats per token. With a reference at this length, budget
        and equality also ``kl ratio``, summed divergence over that of the reference, and ``gap ratio``, the same of
        the summed difference from the dense model's negative log-likelihood.
    """
    tokens, units = [m["tokens"] for m in members], [m["unit"] for m in members]
    columns = {"perplexity": math.exp(_sum(members, "nll") / sum(tokens))}
    if line["policy"] == DENSE:
        return columns
    kl = [m["kl"] * m["tokens"] for m in members]
    columns |= estimate("kl", kl, tokens, units=units)
    # ratios of sums over the same rows, since the means of two policies vary together from row to row
    same_length = [r for r in records if r["length"] == line["length"]]
    base = {r["row"]: r for r in same_length if r["policy"] == against and _setting_of(r) == _setting_of(line)}
    dense = {r["row"]: r for r in same_length if r["policy"] == DENSE}
    if not line["budget"] or not base:
        return columns
    if line["policy"] == against:
        return columns | {"kl ratio": 1.0, "gap ratio": 1.0}

    def gap(record: dict) -> float:
        return (record["nll"] - dense[record["row"]]["nll"]) * record["tokens"]

    reference = [base[m["row"]] for m in members]
    columns |= estimate("kl ratio", kl, [r["kl"] * r["tokens"] for r in reference], units=units)
    return columns | estimate("gap ratio", list(map(gap, members)), list(map(gap, reference)), units=units)


def _setting_of(record: dict) -> tuple:
    return record.get("budget"), record.get("equal")


def _sum(records: list[dict], name: str) -> float:
    """Return the sum over all tokens of a mean over each record's tokens."""
    return sum(r[name] * r["tokens"] for r in records)


def _mean(values) -> float:
    return sum(values) / len(values)


def _lines(records: list[dict], keys: tuple[str, ...] = KEYS) -> Iterator[tuple[dict, list[dict]]]:
    """Yield the lines of a table by length, budget and equality, each with its records.

    A line has ``rows``, their number, and ``MiB``, the mean allocated size of a request.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in keys), []).append(record)
    # the sort is stable: policies keep the order of their records
    for key, members in sorted(groups.items(), key=lambda group: _order(group[1][0])):
        size = {"MiB": _mean([member["allocated"] for member in members]) / 2**20, "rows": len(members)}
        yield dict(zip(keys, key, strict=True)) | size, members


def _order(record: dict) -> tuple:
    return record["length"], record.get("budget") or 0, record.get("equal") == "bytes"
