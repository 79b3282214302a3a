"""Losses of layers and heads equal those of attention with masks, computed naively in float64."""

import pytest
import torch
import torch.nn.functional as F

from kvpop_vllm.calibrate.layers import (
    Evicting,
    RowReplay,
    Windowed,
    attention_errors,
    head_losses,
    layer_losses,
    shared_losses,
)
from kvpop_vllm.evaluation.policies import PolicySpec
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import FAMILIES, random_prompt, write_mixed_model, write_tiny_model

LENGTH, QUERIES, FIRST, WINDOWS = 96, 24, 4, [2, 9, 40]
KINDS = {"qwen3": 2, "llama": 4, "olmo3": 2, "falcon_h1": 2}
"""KV heads of each model. OLMo 3 has a layer with a window between three with full attention; Falcon-H1 has states, so that
all queries run again.
"""


@pytest.fixture(scope="module", params=KINDS)
def replay(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    if request.param in FAMILIES:
        write_mixed_model(folder, request.param)
    else:
        write_tiny_model(folder, request.param, layers=3, kv_heads=KINDS[request.param])
    model, tokens = load_model(folder, torch.float32).eval(), torch.tensor(random_prompt(LENGTH))
    with torch.inference_mode():
        return RowReplay(model, tokens, LENGTH if request.param == "falcon_h1" else QUERIES), tokens


def naive(windows: torch.Tensor, queries: int):
    """Return an attention whose last queries see windows ``[layers, H]``; those before them are dense."""

    def attend(layer, q, k, v, scale):
        group = q.shape[1] // k.shape[1]
        q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            for p in range(q.shape[2]):
                window = int(windows[layer, head // group]) if p >= LENGTH - queries else LENGTH
                visible = [t for t in range(p + 1) if t < FIRST or t > p - window]
                weights = torch.softmax(q[0, head, p] @ k[0, head, visible].T * scale, -1)
                out[0, head, p] = weights @ v[0, head, visible]
        return out.float()

    return attend


def divergence(row, tokens, windows: torch.Tensor) -> float:
    """Return KL(dense || windows) of the last queries' predictions."""
    model, queries = row.model, row.queries
    with torch.inference_mode():
        dense, windowed = (
            model(tokens[None], attend=naive(table, queries)).logits[0, -queries:].double().log_softmax(-1)
            for table in (torch.full_like(windows, LENGTH), windows)
        )
    return float(F.kl_div(windowed, dense, reduction="none", log_target=True).sum(-1).mean())


@pytest.mark.parametrize("layer", [0, -1])
def test_errors_of_attention_are_those_of_single_heads(replay, layer):
    """Each is of one head's outputs with a window, over the outputs of all heads of the layer."""
    row, _ = replay
    layer %= len(row.attended)
    q, k, v = row.attended[layer]
    errors = attention_errors(row, layer, Windowed(FIRST), WINDOWS)
    heads, scale = k.shape[1], row.scales[layer]
    assert len(errors) == heads and scale == pytest.approx(q.shape[-1] ** -0.5)
    for number, window in enumerate(WINDOWS):
        table = torch.full((len(row.attended), heads), window)
        exact, windowed = (
            naive(windows, row.queries)(layer, q, k, v, scale)[:, :, -row.queries :].double()
            for windows in (torch.full_like(table, LENGTH), table)
        )
        by_head = (windowed - exact).square().reshape(heads, -1).sum(1) / exact.square().sum()
        assert [of_head[number] for of_head in errors] == pytest.approx(by_head.tolist(), rel=1e-4, abs=1e-12)
    assert all(of_head[0] > of_head[-1] for of_head in errors), "more slots lose less here"


def test_layers_that_see_everything_lose_nothing(replay):
    row, _ = replay
    for layer in range(3):
        assert max(layer_losses(row, layer, Windowed(FIRST), [LENGTH, 2 * LENGTH])) < 1e-8


def test_a_row_holds_what_runs_again(replay):
    """Inputs and attention of layers with full attention are held, for the last queries alone; of other layers they are not."""
    row, _ = replay
    attention = [tensor.untyped_storage().nbytes() for tensor in row.outputs]
    assert attention == [row.queries * row.attended[0][0].shape[1] * row.attended[0][0].shape[3] * 4] * 3
    sizes = [tensor.untyped_storage().nbytes() for tensor in row.inputs]
    assert sizes == [row.queries * row.model.config.hidden_size * 4] * 3
    arguments = [value for options in row.arguments for value in options.values() if isinstance(value, torch.Tensor)]
    assert len(row.arguments) == row.model.config.num_hidden_layers
    assert not any(value.shape[-1] == row.model.config.hidden_size for value in arguments)


def of_all(row) -> torch.Tensor:
    return torch.full((3, row.attended[0][1].shape[1]), LENGTH)


@pytest.mark.parametrize("layer", range(3))
def test_a_layer_loses_what_masks_say(replay, layer):
    row, tokens = replay
    for window, loss in zip(WINDOWS, layer_losses(row, layer, Windowed(FIRST), WINDOWS), strict=True):
        windows = of_all(row)
        windows[layer] = window
        assert loss == pytest.approx(divergence(row, tokens, windows), rel=1e-3, abs=1e-7) and loss > 1e-6


def test_a_head_loses_what_masks_say(replay):
    row, tokens = replay
    losses = head_losses(row, 1, Windowed(FIRST), WINDOWS)
    assert len(losses) == row.attended[0][1].shape[1]
    for head, of_head in enumerate(losses):
        for window, loss in zip(WINDOWS, of_head, strict=True):
            windows = of_all(row)
            windows[1, head] = window
            assert loss == pytest.approx(divergence(row, tokens, windows), rel=1e-3, abs=1e-7) and loss > 1e-7


@pytest.mark.parametrize("at_once", [1, 3, 4, 16])
def test_the_attention_of_each_size_is_taken_once(replay, monkeypatch, at_once):
    """However few variants run at once."""
    row, _ = replay
    monkeypatch.setattr("kvpop_vllm.calibrate.layers.variants_at_once", lambda queries, length: at_once)
    sizes_run, windowed = [], Windowed(FIRST)

    def counted(row, layer, size, scale):
        sizes_run.append(size)
        return windowed(row, layer, size, scale)

    sizes = [30, 4, 17, 9]
    losses = head_losses(row, 1, counted, sizes)
    assert sizes_run == sizes
    monkeypatch.undo()
    assert losses == [pytest.approx(of_head, rel=1e-4, abs=1e-8) for of_head in head_losses(row, 1, windowed, sizes)]


def test_tables_lose_what_masks_say(replay):
    row, tokens = replay
    tables = torch.randint(2, 60, (3, *of_all(row).shape), generator=torch.Generator().manual_seed(0))
    for table, loss in zip(tables, shared_losses(row, FIRST, tables), strict=True):
        assert loss == pytest.approx(divergence(row, tokens, table), rel=1e-3)


def smallest_norms(layer: int, head: int | None, slots: int):
    """Return an attention in which a layer, or a KV head of it, holds the ``slots`` keys of smallest norm after a window of 8."""

    def attend(number, q, k, v, scale):
        group = q.shape[1] // k.shape[1]
        q, k, v = q.double(), k.double(), v.double()
        out = torch.empty_like(q)
        for h in range(q.shape[1]):
            kv_head, norms = h // group, k[0, h // group].norm(dim=-1)
            for p in range(q.shape[2]):
                visible = list(range(p + 1))
                if number == layer and head in (None, kv_head):
                    long_range = sorted(range(FIRST, p - 7), key=lambda t: float(norms[t]))[:slots]
                    visible = [t for t in visible if t < FIRST or t > p - 8] + long_range
                weights = torch.softmax(q[0, h, p] @ k[0, kv_head, visible].T * scale, -1)
                out[0, h, p] = weights @ v[0, kv_head, visible]
        return out.float()

    return attend


def test_a_layer_and_a_head_lose_what_a_policy_evicts(replay):
    row, tokens = replay
    with torch.inference_mode():
        full = RowReplay(row.model, tokens, LENGTH)  # what comes before the last queries is dense
        exact = row.model(tokens[None], attend=smallest_norms(-1, None, 0)).logits[0].double().log_softmax(-1)
    shape = ModelShape.of(row.model.config, LENGTH)
    evicting = Evicting(PolicySpec("l2norm", "l2norm", protect=0).resolve(shape, 40, sinks=FIRST, window=8))
    sizes = [0, 5, 28]
    losses = {(None, size): loss for size, loss in zip(sizes, layer_losses(full, 1, evicting, sizes), strict=True)}
    losses |= {(1, size): loss for size, loss in zip(sizes, head_losses(full, 1, evicting, sizes)[1], strict=True)}
    for (head, size), loss in losses.items():
        with torch.inference_mode():
            evicted = row.model(tokens[None], attend=smallest_norms(1, head, size)).logits[0].double().log_softmax(-1)
        expected = float(F.kl_div(evicted, exact, reduction="none", log_target=True).sum(-1).mean())
        assert loss == pytest.approx(expected, rel=1e-3, abs=1e-7) and loss > 1e-7
