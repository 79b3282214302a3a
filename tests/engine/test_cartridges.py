"""Requests that begin with cartridges equal the oracle: dense attention over the cartridges' slots and their own tokens."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from distill.byte_tokenizer import BOS, CHAT, byte_tokenizer
from engine.driving import BLOCK, Job, preempt_all, watched
from engine.judge import Judge, Reference
from engine.matrix import BUDGET
from engine.tiny_engine import configure
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import SamplingParams
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.renderers import ChatParams

from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import CartridgeConfig, read_cartridge, write_cartridge
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import load
from kvpop_vllm.config import ConfigError
from kvpop_vllm.requests import RESOLVED
from kvpop_vllm.testing import DisturbedSums, random_prompt, write_tiny_model
from kvpop_vllm.testing.models import write_smollm3
from kvpop_vllm.vllm_glue.extras.cartridge_names import names_of
from kvpop_vllm.vllm_glue.extras.reports import manager_of
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetBackend
from kvpop_vllm.vllm_glue.run.cuda_backend import CudaMetadataBuilder
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

SLOTS = {"plain": 64, "biased": 128, "later": 64}
TIMELINE = {"plain": 64, "biased": 1000, "later": 37}
"""Position of the first own token on each cartridge's timeline."""


def write(folder, model: str, name: str, *, slots: int | None = None, **changes) -> str:
    """Write a cartridge of random keys and values; "biased" and "later" have biases."""
    torch.manual_seed(len(name))
    base, count = base_of(model), slots or SLOTS[name]
    shape = base["num_kv_heads"], count, base["head_dim"]
    bias = name != "plain"
    layers = [
        (torch.randn(shape), torch.randn(shape), torch.randn(shape[:2]) * 2 - 1 if bias else None)
        for _ in range(base["num_layers"])
    ]
    fields = base | {"slots": count, "next_position": TIMELINE[name], "method": "random", "provenance": {}}
    write_cartridge(folder, CartridgeConfig(**(fields | changes)), layers)
    return str(folder)


def unrotated(root):
    """Return a SmolLM3, two cartridges of it, and transformers' model with the cache that they stand for.

    Both cartridges were read elsewhere in a text, so that their keys are turned in the layers that rotate. The cache
    has their tokens where they stand.
    """
    folder, past = write_smollm3(root / "model"), DynamicCache()
    model, tensors, folders = load(str(folder), "float32"), [], []
    for i, first in enumerate((100, 37)):
        tokens, name = random_prompt(64, seed=i), root / f"c{i}"
        layers = [(k, v, None) for k, v in read_corpus(model, tokens, first)]
        sizes = {"slots": 64, "next_position": first + 64, "method": "text", "provenance": {}}
        write_cartridge(name, CartridgeConfig(**base_of(folder), **sizes), layers)
        folders.append(str(name))
        tensors.append(read_corpus(model, tokens, 64 * i))
    for i, pair in enumerate(zip(*tensors, strict=True)):
        past.update(*(torch.cat(same, 1).unsqueeze(0) for same in zip(*pair, strict=True)), i)
    return str(folder), folders, AutoModelForCausalLM.from_pretrained(folder).eval(), past


def turned(k: torch.Tensor, by: int, theta: float) -> torch.Tensor:
    """Return keys ``[H, P, D]`` rotated by ``by`` positions, written out as a product of complex numbers."""
    half = k.shape[-1] // 2
    angles = by * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(k[..., :half].double(), k[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


class CartridgeJudge(Judge):
    """Judge of requests that begin with the same cartridges."""

    def __init__(self, case, folders: list[str], protect: bool | int):
        super().__init__(case.model, case.judge.policy, protect=protect)
        self.rope = self.models[0].config
        pieces, offset = [], 0
        for folder in folders:
            config, layers, _ = read_cartridge(folder)
            shift = offset + config.slots - config.next_position
            pieces.append([self._placed(*layer, shift) for layer in layers])
            offset += config.slots
        self.slots = offset
        self.cartridge = [
            tuple(torch.cat(tensors, 1) for tensors in zip(*layer, strict=True)) for layer in zip(*pieces, strict=True)
        ]

    def _placed(self, k, v, bias, shift):
        theta = (self.rope.get("rope_parameters") or {}).get("rope_theta", self.rope.get("rope_theta", 10000.0))
        return turned(k, shift, theta), v.double(), torch.zeros(k.shape[:2]) if bias is None else bias

    def reference(self, tokens, nudges=(), prompt=0) -> Reference:
        """Return the oracle's run on ``tokens``, which begin with a placeholder for each slot."""
        policy = self.policy.protecting(self.protect, prompt - self.slots, self.slots)
        key = tuple(tokens), nudges, policy.protect
        if key not in self.references:
            exact, low = self.models
            run = exact.run(tokens, policy, bias=nudges, cartridge=self.cartridge)
            with DisturbedSums(0):
                eager = low.run(tokens, policy, visible=run.visible, cartridge=self.cartridge)
            self.references[key] = Reference(run, eager)
        return self.references[key]


CASES = {
    "stateless": ("qwen3", "kvpop-linear", {}),
    "state": ("qwen3", "kvpop", {}),
    "state, protected": ("llama", "kvpop", {"protect_prompt": True}),
    "mass": ("llama", "h2o", {}),
    "gate": ("qwen3", "trimkv", {"sinks": 0, "window": 1, "topk": BUDGET - 1}),
    "moments": ("llama", "momentkv", {}),
    "rounds": ("qwen3", "vase", {"correction": "moment"}),
    "rounds, statistics": ("llama", "triattention", {}),
    "draws": ("qwen3", "random", {"protect_prompt": True}),
    "fixed shares": ("qwen3", "streaming-llm", {"allocator": "pyramid"}),
    "state, GPU": ("qwen3", "kvpop", {}),
    "mass, protected, GPU": ("llama", "h2o", {"protect_prompt": 33}),
}
"""Name -> kind of model, policy, and options of the case. "GPU" asks for the GPU's metadata builder."""
QUICK = ("state", "mass")
FEW = pytest.mark.parametrize("served", [*QUICK, pytest.param("state, GPU", marks=pytest.mark.slow)], indirect=True)
"""Cases of tests that are about blocks and requests, and not about what a policy keeps."""


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """Return ``make(kind)``: the cartridges of a model by name."""
    return lambda kind: {
        name: write(tmp_path_factory.mktemp("cartridge") / name, tiny_model(kind), name) for name in SLOTS
    }


class Served:
    """An engine with cartridges, and a judge for each order in which requests name them."""

    def __init__(self, engine, case, folders):
        self.engine, self.case, self.folders, self.judges = engine, case, folders, {}
        engine.recorder.slots = SLOTS

    def judge(self, names) -> Judge:
        if names not in self.judges:
            protect = self.case.judge.protect
            folders = [self.folders[name] for name in names]
            self.judges[names] = CartridgeJudge(self.case, folders, protect)
        return self.judges[names]

    def serve(self, jobs: list[Job], each_step=None) -> dict:
        """Serve jobs and compare each with the oracle; return the answers by the job's number."""
        jobs = [replace(job, scored=False) for job in jobs]
        answers = self.engine.serve(jobs, each_step)
        number = {name: int(i) for i, name in self.engine.names.items()}
        groups: dict[tuple, dict] = {}
        for name, answer in answers.items():
            names = tuple((jobs[number[name]].asks or {}).get("kv_cartridges", ()))
            groups.setdefault(names, {})[name] = answer
        for names, group in groups.items():
            (self.judge(names) if names else self.case.judge).check(group, self.engine.recorder.retained)
        return {number[name]: answer for name, answer in answers.items()}


@pytest.fixture(scope="module", params=[pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def served(request, case, folders):
    """Yield an engine of one case with three cartridges."""
    kind, policy, options = CASES[request.param]
    matrix_case, paths = case(kind, policy, **options), folders(kind)
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith("GPU"):
            patch.setattr(FixedBudgetBackend, "get_builder_cls", staticmethod(lambda: CudaMetadataBuilder))
            patch.setattr(FixedBudgetBackend, "late", True)
        settings = matrix_case.settings | {"cartridge": [f"{name}={folder}" for name, folder in paths.items()]}
        with watched(matrix_case.model, settings, None, num_gpu_blocks_override=321) as engine:
            engine.poison(patch)
            yield Served(engine, matrix_case, paths)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        served.engine.chunk(None)
        pool, cartridges = served.engine.recorder.pool, served.engine.recorder.manager.cartridges
        pinned = sorted(block.block_id for cartridge in cartridges.loaded.values() for block in cartridge.blocks)
        assert pinned == [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        assert len(pinned) == sum(SLOTS.values()) // BLOCK == 320 - pool.get_num_free_blocks()
        assert not cartridges.copies


def named(*names: str, **options) -> dict:
    return {"kv_cartridges": list(names)} | options


def test_one_cartridge(served):
    """Requests after a cartridge are the oracle's, with biases and without, and so are those of the base model."""
    jobs = [Job(40, new=70, asks=named("plain")), Job(40, new=70, asks=named("biased")), Job(40, new=70)]
    answers = served.serve(jobs)
    assert [len(answers[i].prompt_token_ids) for i in range(3)] == [104, 168, 40]
    assert answers[0].num_cached_tokens == 64 and answers[1].num_cached_tokens == 128
    tokens = [tuple(answers[i].outputs[0].token_ids) for i in range(3)]
    assert len(set(tokens)) == 3
    assert all(set(a.prompt_token_ids) == set(random_prompt(40, seed=40)) for a in answers.values())  # so for penalties


@FEW
def test_what_a_cartridge_holds_of_a_prompt_is_left_out(served, monkeypatch):
    """A prompt that begins with the head is what stands after it; another prompt is refused."""
    names, head = names_of(served.engine.engine.vllm_config), (5, 9, 7)
    for name in ("biased", "plain"):
        monkeypatch.setitem(names.served, f"{name} headed", replace(names.served[name], head=head))
        monkeypatch.setitem(served.folders, f"{name} headed", served.folders[name])
        monkeypatch.setitem(SLOTS, f"{name} headed", SLOTS[name])
    headed, both_headed, tokens = named("biased headed"), named("plain headed", "biased headed"), random_prompt(40)
    jobs = [Job(prompt=[*head, *tokens], new=30, asks=headed), Job(prompt=tokens, new=30, asks=named("biased"))]
    jobs += [
        Job(prompt=[*head, *tokens], new=30, asks=both_headed),
        Job(prompt=tokens, new=30, asks=named("plain", "biased")),
    ]
    answers = served.serve(jobs)
    for left, right in ((0, 1), (2, 3)):
        assert answers[left].prompt_token_ids == answers[right].prompt_token_ids
        assert answers[left].outputs[0].token_ids == answers[right].outputs[0].token_ids
    for prompt, asks, text in (
        (tokens, headed, "'biased headed' stands in the first message of a chat: begin with a message of the user"),
        ([*head], headed, "the prompt ends where the cartridge begins"),
        (
            [*head, *tokens],
            named("biased headed", "plain"),
            "biased headed and plain were made with different system messages or places",
        ),
    ):
        with pytest.raises(VLLMValidationError, match=text):
            served.engine.add("x", Job(prompt=prompt, scored=False, asks=asks))
    assert not served.engine.engine.has_unfinished_requests()
    for name in ("biased", "plain"):
        monkeypatch.delitem(SLOTS, f"{name} headed")


@FEW
@pytest.mark.parametrize("length", [1, 2, BLOCK, 120])
def test_short_and_long_prompts(served, length):
    """A prompt of one token is decoded at once; the first step is not at position 0."""
    served.serve([Job(length, new=6, asks=named("biased"))])


def test_several_cartridges_in_one_request(served):
    """Cartridges stand one after another in the order of the request, and copies live as long as requests."""
    orders = [("plain", "biased"), ("biased", "plain"), ("later", "plain", "biased"), ("later",)]
    first = served.serve([Job(30, new=30, asks=named(*order)) for order in orders])
    again = served.serve([Job(30, new=30, asks=named(*order)) for order in orders[::-1]])
    assert [first[i].outputs[0].token_ids for i in range(4)] == [again[3 - i].outputs[0].token_ids for i in range(4)]


def test_chunks(served):
    served.engine.chunk(7)
    jobs = [Job(1, new=40, asks=named("plain")), Job(50, asks=named("biased")), Job(33, asks=named("later", "plain"))]
    served.serve(jobs)
    assert set(served.engine.chunks(served.engine.names["1"])[:7]) == {7}


def test_sixteen_requests_with_different_cartridges(served):
    """MomentKV's tokens are drawn: if it repeats itself, the residuals of equal values are ties of more than two."""
    names = [("plain",), ("biased",), ("later",), ()]
    asks = [named(*cartridges) if cartridges else None for cartridges in names]
    heat = float(served.case.settings["policy"] == "momentkv")
    jobs = [Job(10 + 7 * i, new=20, temperature=heat, asks=asks[i % 4]) for i in range(16)]
    served.serve(jobs)
    assert max(len(step.running) for step in served.engine.recorder.blocks) == 16


def test_preemption(served):
    """Preempted requests come back after the same cartridges."""
    jobs = [Job(60, new=50, asks=named("biased")), Job(20, new=50, asks=named("later", "biased")), Job(45, new=50)]
    served.serve(jobs, lambda i: preempt_all(served.engine.recorder.scheduler) if i in (3, 30) else None)
    assert min(served.engine.recorder.preemptions.values()) > 0


@FEW
def test_the_prefix_cache_is_reset_while_cartridges_are_loaded(served):
    """Requests in flight begin again after the same cartridges, whose blocks stay where they are."""
    engine, scheduler = served.engine.engine, served.engine.recorder.scheduler
    loaded = manager_of(scheduler).cartridges.loaded
    before = {digest: [block.block_id for block in cartridge.blocks] for digest, cartridge in loaded.items()}
    resets = []

    def reset(i):
        if i in (3, 30):
            served.engine.poisons = False  # the cartridges' blocks are let go for a moment
            assert not engine.reset_prefix_cache()  # requests hold blocks
            resets.append(engine.reset_prefix_cache(reset_running_requests=True))
            served.engine.poisons = True

    jobs = [Job(60, new=50, asks=named("biased")), Job(20, new=50, asks=named("later", "biased")), Job(45, new=50)]
    served.serve(jobs, reset)
    assert resets == [True, True] and min(served.engine.recorder.preemptions.values()) > 0
    served.engine.poisons = False
    assert engine.reset_prefix_cache()
    served.engine.poisons = True
    assert {digest: [block.block_id for block in cartridge.blocks] for digest, cartridge in loaded.items()} == before
    assert all(block.ref_cnt == 1 for cartridge in loaded.values() for block in cartridge.blocks)


@FEW
def test_the_prefix_cache_is_reset_while_a_request_waits_with_a_copy(served, monkeypatch):
    """It has no room, and makes its copy again."""
    engine, manager = served.engine.engine, served.engine.recorder.manager
    resets, needed = [], manager.get_num_blocks_to_allocate

    def without_room(request_id, *arguments, **options):
        full = not resets and request_id in manager.placed
        return manager.block_pool.num_gpu_blocks if full else needed(request_id, *arguments, **options)

    monkeypatch.setattr(manager, "get_num_blocks_to_allocate", without_room)

    def reset(i):
        if i == 3:
            assert manager.cartridges.copies and manager.placed - set(manager.req_to_blocks)
            served.engine.poisons = False
            resets.append(engine.reset_prefix_cache(reset_running_requests=True))
            served.engine.poisons = True

    jobs = [Job(200, new=40, scored=False), Job(20, new=8, asks=named("plain", "biased"), scored=False)]
    answers = served.engine.serve([*jobs[:1] * 2, *jobs[1:]], reset)
    assert resets == [True] and len(answers) == 3


@FEW
def test_a_cartridge_that_is_being_loaded_is_not_served(served):
    """The front end knows it when the engine has it."""
    names = names_of(served.engine.engine.vllm_config)
    cartridge = names.read("new", str(served.folders["plain"]))
    with pytest.raises(VLLMNotFoundError, match="'new' does not exist"):
        served.engine.add("x", Job(10, scored=False, asks=named("new")))
    assert "new" not in names.placed and cartridge.placed.slots == SLOTS["plain"]


@FEW
def test_aborts(served):
    """An aborted request frees its copies, also while it waits."""
    engine = served.engine
    engine.recorder.clear()
    engine.names.clear()
    for i in range(3):
        engine.add(str(i), Job(40, new=40, scored=False, asks=named("biased", "later")))
        for _ in range(2 * i):
            engine.engine.step()
        engine.engine.abort_request([engine.names[str(i)]], internal=True)
    assert not engine.engine.has_unfinished_requests()
    served.serve([Job(40, new=8, asks=named("biased", "later"))])


@FEW
def test_a_copy_waits_for_room(served):
    """A request whose copy does not fit waits until others have ended."""
    with served.engine.small_pool(40):
        jobs = [Job(200, new=30, asks=named("biased")), Job(20, new=8, asks=named("plain", "biased"))]
        answers = served.serve([*jobs, replace(jobs[0], new=31), replace(jobs[1], new=9)])
    assert len(answers) == 4


@FEW
def test_a_request_that_waits_holds_no_copies(served):
    """A copy for a request that could not be admitted does not take the room of the one that is looked at next."""
    manager = served.engine.recorder.manager
    placed = [list(names_of(served.engine.engine.vllm_config).placed[name]) for name in ("plain", "biased")]

    def request(name: str, cartridges: list):
        slots = [64 + 128, 64 + 128, BUDGET, 16, None, 0, 0, cartridges]
        params = SimpleNamespace(extra_args={RESOLVED: slots})
        return SimpleNamespace(request_id=name, sampling_params=params, num_prompt_tokens=200, max_tokens=5)

    assert (
        len(manager.admit(request("waits", placed), 1024)) == (64 + 128) // BLOCK
        and len(manager.cartridges.copies) == 1
    )
    assert manager.admit(request("next", []), 1024) == [] and not manager.cartridges.copies
    for name in ("waits", "next"):
        manager.requests.pop(name)


def test_prefixes_after_a_cartridge_are_shared(served):
    """The prefix cache tells cartridges apart, and shares protected prompts after the same ones, and no others."""
    text = random_prompt(100, seed=3)
    jobs = [Job(prompt=text, new=4, asks=named(*names)) for names in (("plain",), ("later",), ("biased",))]
    cold, warm = served.serve(jobs), served.serve(jobs)
    assert [cold[i].num_cached_tokens for i in range(3)] == [64, 64, 128]
    protect = served.case.judge.protect
    shared = max(0, (len(text) if protect is True else protect) - 1) // BLOCK * BLOCK
    assert [warm[i].num_cached_tokens for i in range(3)] == [64 + shared, 64 + shared, 128 + shared]
    assert [cold[i].outputs[0].token_ids for i in range(3)] == [warm[i].outputs[0].token_ids for i in range(3)]
    salted = served.serve([replace(jobs[0], salt="tenant")])
    assert salted[0].num_cached_tokens == 64


@FEW
def test_requests_of_an_unknown_kind_are_refused(served):
    """Each refusal is one line; nothing is queued."""
    for asks, error, text in (
        (named("nothing"), VLLMNotFoundError, "'nothing' does not exist: name one of plain, biased, later"),
        (named("plain", "plain"), VLLMValidationError, "twice"),
        ({"kv_cartridges": "plain"}, VLLMValidationError, "list of names"),
    ):
        with pytest.raises(error, match=text):
            served.engine.add("x", Job(10, scored=False, asks=asks))
    with pytest.raises(VLLMValidationError, match="cache_salt must not begin with 'kvpop '"):
        served.engine.add("x", Job(10, scored=False, salt="kvpop a "))
    with pytest.raises(VLLMValidationError, match="prompt_logprobs"):
        served.engine.add("x", Job(10, asks=named("plain")))
    with pytest.raises(VLLMValidationError, match="no room within --max-model-len 1024"):
        served.engine.add("x", Job(960, scored=False, asks=named("plain")))
    assert not served.engine.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "changes, settings, options, text",
    [
        ({}, {"policy": "snapkv", "budget": 64}, {}, "--kv-policy snapkv gives up what stands before a prompt's end"),
        ({}, {}, {"enable_prefix_caching": False}, "leave --no-enable-prefix-caching, or cartridges, out"),
        ({}, {}, {"block_size": 128}, "64 slots, no multiple of --block-size 128"),
        ({}, {}, {"max_model_len": 64}, "64 slots: raise --max-model-len 64 above them"),
        ({"model_type": "llama"}, {}, {}, "made for a model with model_type = 'llama'"),
        ({"base": {"config": "0", "weights": None}}, {}, {}, "a model of other sizes"),
        (
            {"rope": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            {},
            "change with the length of a text",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_cartridges_that_cannot_be_served(tiny_model, tmp_path, changes, settings, options, text):
    """The engine's config refuses them in one line, before weights are loaded."""
    folder = tmp_path / "c"
    write(folder, tiny_model("qwen3"), "plain")
    config = folder / "kvpop_cartridge.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=text) as caught:
        configure(
            tiny_model("qwen3"), settings | {"cartridge": {"a": str(folder)}}, **({"max_model_len": 256} | options)
        )
    assert "\n" not in str(caught.value)


def test_without_a_policy_everything_after_a_cartridge_is_kept(tiny_model, tmp_path):
    folder = write(tmp_path / "c", tiny_model("qwen3"), "plain")
    config = configure(tiny_model("qwen3"), {"cartridge": [f"a={folder}"]})
    policy = engine_policy(config)
    assert policy.name == "full" and policy.retention.budget == 256 and config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    "rope, text",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta = 10000.0, .* has 500000.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "with factor = None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "with factor = None"),
        ({"no_rope_layers": [1, 0]}, "unrotated_layers = None, .* has .1."),
    ],
)
def test_the_engines_own_rotation_is_compared(tiny_model, tmp_path, rope, text):
    """--hf-overrides change what the engine computes, and the model's folder stays as it is."""
    folder = write(tmp_path / "c", tiny_model("qwen3"), "plain")
    with pytest.raises(ConfigError, match=text):
        configure(tiny_model("qwen3"), {"cartridge": [f"a={folder}"]}, hf_overrides=rope)


@pytest.fixture(scope="module", params=["no literal BOS", "BOS in the template"])
def inputs(request, tmp_path_factory):
    """Return a tokenizer that adds BOS, a renderer, and a function from an input of the engine to the ids that it serves."""
    from vllm.renderers.registry import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    root = tmp_path_factory.mktemp("bos")
    model = write_tiny_model(root / "model", vocab=258)
    tokenizer = byte_tokenizer(CHAT if request.param == "no literal BOS" else f"<bos>{CHAT}", bos=True)
    tokenizer.save_pretrained(model)
    config = configure(model, {"cartridge": [f"a={write(root / 'c', model, 'plain')}"]}, skip_tokenizer_init=False)
    renderer = renderer_from_config(config)
    processor = InputProcessor(config, renderer)

    def served(prompt, **asks):
        params = SamplingParams(max_tokens=4, extra_args=asks)
        return processor.process_inputs("x", prompt, params, ("generate",)).prompt_token_ids

    yield tokenizer, renderer, served
    renderer.shutdown()


def test_prompts_after_a_cartridge_in_front_are_the_fits(inputs):
    """Texts and chats have no BOS there, in engines and in servers; ids that a client gave stay as they are."""
    tokenizer, renderer, served = inputs
    place, text = place_of(tokenizer, "front"), "\n\nWhat?\n\n"
    fit = place_of(byte_tokenizer(template=None, bos=True)).asking("What?")
    slots = SLOTS["plain"]
    echoed = renderer.default_cmpl_tok_params.with_kwargs(needs_detokenization=True)

    def after(prompt):
        ids = served(prompt, **named("a"))
        assert len(set(ids[: slots + 1])) == 1
        return ids[slots:]

    def completed(prompt, params=None):
        (engine_input,) = renderer.render_cmpl([prompt], params)
        return engine_input

    assert after(completed({"prompt": text})) == after(completed({"prompt": text}, echoed)) == fit
    assert after(completed({"prompt": f"<bos>{text}"})) == [BOS, *fit]  # the client's own
    assert served(completed({"prompt": text})) == [BOS, *fit]  # without a cartridge
    for ids in ([BOS, *fit], fit, [BOS, BOS, *fit]):
        for params in (None, echoed):
            assert after(completed({"prompt_token_ids": ids}, params)) == ids
    chat = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    messages = [{"role": "user", "content": "What?"}]
    rendered = [renderer.render_chat([messages], chat), asyncio.run(renderer.render_chat_async([messages], chat))]
    for _, (engine_input,) in rendered:
        assert list(b"\n\n") + after(engine_input) == place.asking("What?")
