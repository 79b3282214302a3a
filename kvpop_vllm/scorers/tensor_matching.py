"""Matching of a published scorer's tensors: the tensor, the order of its axes and the slice of every piece of the formula.

Published checkpoints name, stack and transpose the pieces of one formula (KVpop, appendix E) in ways of their own. A
piece is matched by its shape and by hints in its name. All readings that fit are listed, and callers serve a
checkpoint only where there is one.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvpop_vllm.config import ConfigError

PIECES = {
    "query": ("q_proj", ("head", "in", "out"), "features"),
    "key": ("k_proj", ("head", "in", "out"), "features"),
    "value": ("v_proj", ("head", "in", "out"), "values"),
    "input gate": ("igate.weight", ("head", "in"), None),
    "input gate bias": ("igate.bias", ("head",), None),
    "forget gate": ("fgate.weight", ("head", "in"), None),
    "forget gate bias": ("fgate.bias", ("head",), None),
    "score": ("out.weight", ("head", "out"), "values"),
    "score bias": ("out.bias", ("head",), None),
    "decay": ("decay_logit", ("head",), None),
    "norm": ("norm.weight", ("head", "out"), "values"),
    "skip": ("skip.weight", ("head", "in"), None),
}
"""Name in our format, axes, and what the axis ``out`` counts, of each piece."""
REQUIRED = ("query", "key", "input gate", "forget gate", "score")
"""Pieces that every scorer has. Biases that are missing are 0."""
MERGES = (("head", "out"), ("head", "in"), ("head", "part"), ("layer", "head"), ("layer", "head", "out"))
"""Axes that one axis of a tensor may hold, the last of them fastest."""
WIDEST = 4096
"""Largest number of columns of queries and keys that is tried where a tensor holds them with values."""
MOST = 64
"""Number of readings after which the search ends."""

_NOISE = frozenset(
    "w weight weights proj projs projection projector linear lin to layer preact act map feature features featuremap fm phi"
    " param params mat vec head heads headwise mlstm lstm xlstm cell scorer kvpop importance mem memory bias b new 0".split()
)
_NORM = re.compile(r"((out|output|multi_?head|h|g|readout|score)_?)?(rms_?|layer_?)?norm|ln")
_HINTS = (
    (_NORM, ("norm",)),
    (r".*(skip|residual|shortcut).*", ("skip",)),
    (r".*(decay|gamma).*|alpha", ("decay",)),
    (r"q|wq|query|queries", ("query",)),
    (r"k|wk|key|keys", ("key",)),
    (r"v|wv|value|values", ("value",)),
    (r"i|wi|bi|ig|i_?gate|in_?gate|input|input_?gate", ("input gate",)),
    (r"f|wf|bf|fg|f_?gate|forget|forget_?gate", ("forget gate",)),
    (r"o|bo|a|out|output|score|scores|readout|final", ("score",)),
    (r"qkv|qkv_?o?preact", ("query", "key", "value")),
    (r"qk", ("query", "key")),
    (r"kv", ("key", "value")),
    (r"if|i_f|if_?gates?", ("input gate", "forget gate")),
    (r"fi|f_i|fi_?gates?", ("forget gate", "input gate")),
)
_FUSED_GATES = re.compile(r"gates?")
_FOREIGN = re.compile(r"o_?gate|output_?gate|.*conv(1d)?|z|up|down|.*norm|ln_.*|.*_ln")
"""Pieces that public mLSTM blocks have and a scorer does not, norms of inputs among them."""
_NORM_OF_HEADS = re.compile(r"(head|out|g_?(rms_?|layer_?)?norm)[^.]*(\.weight)?$")
"""Names of norms whose one axis of all heads is normed head by head. A bare ``norm`` might be of all at once."""


@dataclass(frozen=True)
class Stack:
    """Tensors that one template names, such as ``model.layers.{layer}.scorer.q_proj.weight``.

    Attributes:
        template: name with ``{layer}`` and ``{head}`` where the names have their numbers.
        shape: shape of each tensor.
    """

    template: str
    shape: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that the names hold."""
        return tuple(axis for axis in ("layer", "head") if f"{{{axis}}}" in self.template)


@dataclass(frozen=True)
class Sizes:
    """Sizes that the model gives: layers, KV heads H and head size D."""

    layers: int
    heads: int
    dim: int


Pieces = dict[str, dict]
"""Place of each piece: ``tensor``, ``axes`` and, where a tensor holds several pieces, ``part``, ``slice`` or ``rows``."""


def stacks(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes, source: str) -> list[Stack]:
    """Group the names of scorer tensors into templates. ``source`` names the checkpoint in errors."""
    groups: dict[tuple, dict[str, tuple[int, ...]]] = {}
    for name in sorted(shapes):
        # names that differ in numbers only are one group
        words = tuple("#" if word.isdecimal() else word for word in name.split("."))
        groups.setdefault(words, {})[name] = tuple(shapes[name])
    all_stacks = [stack for group in groups.values() for stack in _split(group, sizes, source)]
    return sorted(all_stacks, key=lambda stack: stack.template)


def _split(group: dict[str, tuple[int, ...]], sizes: Sizes, source: str) -> Iterator[Stack]:
    rows = {name: name.split(".") for name in group}
    first = next(iter(rows.values()))
    numbered = [i for i, word in enumerate(first) if word.isdecimal()]
    axis_words: dict[str, int] = {}
    for i in numbered:
        values, before = {row[i] for row in rows.values()}, first[i - 1] if i else ""
        # a number after "layers" is the layer, whatever the others are
        if "layer" not in axis_words and re.fullmatch(r"layers?|blocks|h", before):
            _check_layers(values, rows, i, sizes.layers, source)
            axis_words["layer"] = i
        elif "layer" not in axis_words and sizes.layers > 1 and values == set(map(str, range(sizes.layers))):
            axis_words["layer"] = i
        elif "head" not in axis_words and sizes.heads > 1 and values == set(map(str, range(sizes.heads))):
            axis_words["head"] = i
        # the number is neither a layer nor a head, so that each value is a tensor of its own
        elif len(values) > 1:
            for value in sorted(values):
                yield from _split({n: s for n, s in group.items() if rows[n][i] == value}, sizes, source)
            return
    counts = {"layer": sizes.layers, "head": sizes.heads}
    for axis, i in axis_words.items():
        first = [*first[:i], f"{{{axis}}}", *first[i + 1 :]]
    template = ".".join(first)
    for numbers in itertools.product(*(range(counts[axis]) for axis in axis_words)):
        name = template
        for axis, number in zip(axis_words, numbers, strict=True):
            name = name.replace(f"{{{axis}}}", str(number))
        if name not in group:
            raise ConfigError(
                f"{source}: tensor {name} is missing, and others of its kind are there: complete the folder"
            )
    shape = next(iter(group.values()))
    if odd := [name for name, other_shape in group.items() if other_shape != shape]:
        raise ConfigError(f"{source}: tensor {odd[0]} has shape {group[odd[0]]}, and others of its kind have {shape}")
    yield Stack(template, shape)


def _check_layers(values: set[str], rows: dict[str, list[str]], i: int, layers: int, source: str) -> None:
    expected = set(map(str, range(layers)))
    if unexpected := sorted(values - expected):
        name = next(name for name, row in rows.items() if row[i] == unexpected[0])
        raise ConfigError(f"{source}: tensor {name} is of layer {unexpected[0]}, and config.json says {layers} layers")
    if lacking := sorted(expected - values):
        name = ".".join([*next(iter(rows.values()))[:i], lacking[0], *next(iter(rows.values()))[i + 1 :]])
        raise ConfigError(f"{source}: tensor {name} is missing, and others of its kind are there: complete the folder")


def hint(template: str) -> tuple[tuple[str, ...], bool] | None:
    """Return the pieces that a name hints at, in the order in which a tensor holds them, and whether it is a bias.

    No pieces mean that the name hints at none. None means that the name is of a piece that no scorer has.
    """
    words = [word for word in template.split(".") if not word.startswith("{") and not word.isdecimal()]
    # qProj is q_proj
    words = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower().replace("-", "_") for word in words]
    last = words[-1] if words else ""  # a name of numbers alone
    bias = re.fullmatch(r"(.*_)?bias|b|b_.*|b[ifo]", last) is not None
    # the last words say most: `q_proj.weight` in `mlstm.q_proj.weight`
    for word in reversed(words):
        tokens = word.split("_")
        core = "_".join(token for token in tokens if token not in _NOISE)
        if word == "b" and bias:
            return ("score",), True
        if _FUSED_GATES.fullmatch(core):
            return ("gates",), bias
        if not _NORM.fullmatch(core) and _FOREIGN.fullmatch(core):
            return None
        for pattern, pieces in _HINTS:
            if re.fullmatch(pattern, core):
                return pieces, bias
    return (), bias


@functools.lru_cache(maxsize=4096)
def patterns(shape: tuple[int, ...], axes: frozenset[str], sizes: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """Return the orders of axes in which a shape can hold the given axes, and the size of ``out`` in each.

    Args:
        shape: shape of a tensor.
        axes: axes that it must hold, each once.
        sizes: sizes of the axes by name. That of ``out`` may be missing.

    Returns:
        Pairs of a pattern such as ``(head out) in``, in which 1 is an axis of that length, and the size of ``out`` (0
        without one).
    """
    axis_sizes = dict(sizes)
    axes_left = frozenset(axis for axis in axes if axis_sizes.get(axis) != 1)  # an axis of length 1 may be left out

    def place(remaining: tuple[int, ...], left: frozenset[str], begun: bool) -> Iterator[tuple[list[str], int]]:
        if not remaining:
            # a reading needs every axis
            if not left:
                yield [], axis_sizes.get("out", 0)
            return
        length = remaining[0]
        if length == 1:
            yield from ((["1", *words], out) for words, out in place(remaining[1:], left, begun))
        for names in [(axis,) for axis in sorted(left)] + [merge for merge in MERGES if left.issuperset(merge)]:
            # layers come first or in the names
            if begun and names[0] == "layer":
                continue
            fixed = math.prod(axis_sizes[axis] for axis in names if axis in axis_sizes)
            unknown = "out" in names and "out" not in axis_sizes
            # the axes do not fill this length
            if length % fixed or (not unknown and fixed != length) or (unknown and length // fixed < 2):
                continue
            text = names[0] if len(names) == 1 else f"({' '.join(names)})"
            for words, out in place(remaining[1:], left - set(names), True):
                yield [text, *words], length // fixed if unknown else out

    return list(dict.fromkeys((" ".join(words), out) for words, out in place(shape, axes_left, False)))


def uses_of(stack: Stack, sizes: Sizes) -> list[tuple[Pieces, dict[str, int]]]:
    """Return what a stack may be: places of pieces, and the sizes ``features`` and ``values`` that they imply."""
    hinted = hint(stack.template)
    if hinted is None:
        return []
    pieces, bias = hinted
    axis_sizes = {"layer": sizes.layers, "head": sizes.heads, "in": 2 * sizes.dim}
    missing = {"layer", "head"} - set(stack.axes)
    # the name does not say which gate comes first, so both orders are tried
    if pieces == ("gates",):
        orders = [("input gate", "forget gate"), ("forget gate", "input gate")]
        return [use for order in orders for use in _fused(stack, order, bias, axis_sizes, missing)]
    if len(pieces) > 1:
        return _fused(stack, pieces, bias, axis_sizes, missing)
    uses = []
    # a norm over all heads at once is another formula, which a single axis of all heads cannot rule out
    joint = pieces == ("norm",) and not _NORM_OF_HEADS.search(stack.template.lower())
    for piece in pieces or (() if bias else REQUIRED):
        piece = f"{piece} bias" if bias else piece
        if piece not in PIECES:
            continue
        _, axes, counts = PIECES[piece]
        # one norm may be shared by all heads
        forms = [axes, ("out",)] if piece == "norm" and "head" not in stack.axes else [axes]
        for form in forms:
            # a norm that heads share has no head axis to place
            lacking = missing - ({"head"} - set(form))
            axes_left = frozenset(set(form) - set(stack.axes) | lacking)
            for axis_order, out in patterns(stack.shape, axes_left, tuple(axis_sizes.items())):
                if not (joint and "(head out)" in axis_order):
                    uses.append(({piece: _map_entry(stack, axis_order)}, {counts: out} if counts else {}))
    return uses


def _map_entry(stack: Stack, axis_order: str, **fields) -> dict:
    return {"tensor": stack.template, "axes": axis_order, **fields}


def _fused(stack, pieces, bias, axis_sizes, missing) -> list[tuple[Pieces, dict[str, int]]]:
    names = [f"{piece} bias" if bias else piece for piece in pieces]
    if any(name not in PIECES for name in names):
        return []
    axes, count = set(PIECES[names[0]][1]), len(names)
    axes_left = frozenset(axes - set(stack.axes) | missing | {"part"})
    uses = []
    for axis_order, out in patterns(stack.shape, axes_left, (*axis_sizes.items(), ("part", count))):
        placed = {name: _map_entry(stack, axis_order, part=i) for i, name in enumerate(names)}
        uses.append((placed, {PIECES[name][2]: out for name in names if PIECES[name][2]}))
    uses += _rows(stack, names, axis_sizes, axes_left - {"part"})
    if "out" not in axes:
        return uses
    for axis_order, width in patterns(stack.shape, axes_left - {"part"}, tuple(axis_sizes.items())):
        for features, remaining, widths in _divisions(names, width):
            ends = list(itertools.accumulate(widths))
            placed = {
                name: _map_entry(stack, axis_order, slice=[end - part, end])
                for name, part, end in zip(names, widths, ends, strict=True)
            }
            uses.append((placed, {"features": features} | ({"values": remaining} if remaining else {})))
    return uses


def _divisions(names: list[str], width: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the columns of queries and keys, of values, and of each piece in turn, where a tensor has ``width`` in all."""
    for features in range(1, min(width, WIDEST)):
        widths = [features if PIECES[name][2] == "features" else 0 for name in names]
        remaining = width - sum(widths)
        # pieces of values need columns, and without such pieces none may be left over
        if (remaining == 0) == (widths.count(0) == 0) and remaining >= 0:
            yield features, remaining, [part or remaining for part in widths]


def _rows(
    stack: Stack, names: list[str], axis_sizes: dict[str, int], axes_left: frozenset[str]
) -> list[tuple[Pieces, dict[str, int]]]:
    """Return the readings of a tensor whose first axis holds all heads of one piece, then all of the next."""
    heads, uses = axis_sizes["head"], []
    if "head" not in axes_left or heads == 1 or stack.shape[0] % heads:
        return []
    width = stack.shape[0] // heads
    equal = [(0, 0, [width // len(names)] * len(names))] if width % len(names) == 0 else []
    for features, unused, widths in _divisions(names, width) if "out" in axes_left else equal:
        ends = list(itertools.accumulate(heads * part for part in widths))
        orders = []
        for part in widths:
            sizes = (*axis_sizes.items(), ("out", part)) if "out" in axes_left else tuple(axis_sizes.items())
            shape = (heads * part, *stack.shape[1:])
            orders.append(
                [
                    order
                    for order, _ in patterns(shape, axes_left, sizes)
                    # rows are of heads, so that the head comes first
                    if order.split(" in")[0] in ("head", "(head out)")
                ]
            )
        for axis_order in orders[0]:
            if all(axis_order in order for order in orders):
                place = {
                    name: _map_entry(stack, axis_order, rows=[end - heads * part, end])
                    for name, part, end in zip(names, widths, ends, strict=True)
                }
                bound = {"features": features} | ({"values": unused} if unused else {}) if "out" in axes_left else {}
                uses.append((place, bound))
    return uses


def places(all_stacks: list[Stack], sizes: Sizes, source: str) -> list[Pieces]:
    """Return every way to use each stack of tensors once so that a scorer is complete, up to :data:`MOST`.

    Of those that differ in the order of axes, the ones that order pieces of one kind alike are returned.

    Args:
        all_stacks: all stacks of scorer tensors. See :func:`stacks`.
        sizes: sizes of the model.
        source: name of the checkpoint in errors.
    """
    options = [(stack, uses_of(stack, sizes)) for stack in all_stacks]
    for stack, uses in options:
        if not uses:
            raise ConfigError(
                f"{source}: tensor {stack.template} {list(stack.shape)} is no piece of an mLSTM scorer of {sizes.heads} heads with"
                f" keys and values of {sizes.dim}: see 'kvpop inspect-checkpoint {source}'"
            )
    # the fewest choices first, which ends the search early
    options.sort(key=lambda option: len(option[1]))
    complete: list[Pieces] = []

    def choose(i: int, chosen: Pieces, bound: dict[str, int]) -> None:
        # more readings than anyone would look at: the error then says so
        if len(complete) >= MOST**2:
            return
        if i == len(options):
            if all(piece in chosen for piece in REQUIRED) and _fits(chosen, bound, sizes):
                complete.append(chosen)
            return
        for pieces, implied in options[i][1]:
            # no piece twice, and no size with two values
            if not chosen.keys() & pieces.keys() and all(bound.get(n, size) == size for n, size in implied.items()):
                choose(i + 1, chosen | pieces, bound | implied)

    choose(0, {}, {})
    # authors arrange like tensors alike, which leaves few readings
    fewest = min(map(_orders, complete), default=0)
    alike = [chosen for chosen in complete if _orders(chosen) == fewest]
    return [{piece: chosen[piece] for piece in PIECES if piece in chosen} for chosen in alike[:MOST]]


def _orders(chosen: Pieces) -> int:
    """Return how many orders of axes pieces of one kind have. One author arranges projections, or gates, alike."""
    kinds = ("query", "key", "value"), ("input gate", "forget gate")
    return sum(len({chosen[piece]["axes"] for piece in kind if piece in chosen}) for kind in kinds)


def _fits(chosen: Pieces, bound: dict[str, int], sizes: Sizes) -> bool:
    """Return whether the values that are read without a projection have the model's head size."""
    return "value" in chosen or bound.get("values") == sizes.dim


def lacking(all_stacks: list[Stack], sizes: Sizes) -> list[str]:
    """Return the pieces that every scorer has and no stack can be."""
    able = {piece for stack in all_stacks for pieces, _ in uses_of(stack, sizes) for piece in pieces}
    return [piece for piece in REQUIRED if piece not in able]
