"""Oracle of models whose layers are of several kinds: transformers in float64, with one naive attention function.

Layers of full attention retain tokens as a policy of the naive oracle says. Queries of the others see a window, or
their chunk. All else is the code of transformers.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .models import random_prompt
from .oracle import OracleRun
from .oracle_coupled import masked_attention
from .oracle_policy import OraclePolicy

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, HYBRID = "linear_attention", "hybrid"
ORACLE_ATTENTION = "oracle_of_kinds"
"""Name of the oracle's attention among transformers' functions."""
_QK_SPREAD, _V_SPREAD, _O_SPREAD, _MLP_SPREAD, _LOGIT_SPREAD = 1.3, 1.0, 1.0, 0.7, 0.3
# weights of norms of queries and keys, more than their identity: larger spreads enlarge rounding more than influence
_SELECTIVE = 0.4
_SINK = 2.0  # mean logit of attention sinks

S, F, C, R, H = SLIDING, FULL, CHUNKED, RECURRENT, HYBRID
_DELTA_NET = {
    "layer_types": [R, F, R, F, R, F],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FAMILIES = {
    "gemma3_text": {"layer_types": [S, S, F, S, S, F], "sliding_window": 48, "query_pre_attn_scalar": 32},
    "olmo3": {"layer_types": [F, S, F, F], "sliding_window": 48},
    "exaone4": {"layer_types": [S, S, S, F], "sliding_window": 48},
    "llama4_text": {
        "layer_types": [C, C, C, F],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 64,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "attn_temperature_tuning": False,  # as vLLM sets it for texts of up to 32,768 tokens
    },
    "gemma4_text": {
        "layer_types": [S, S, F, S, S, F],
        "sliding_window": 48,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {"layer_types": [S, F, S, F], "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"layer_types": [F, S, S, F], "sliding_window": 48, "attention_multiplier": 32**-0.5},
    "nemotron_h": {
        "layer_types": [R, F, "mlp", R, F, "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "time_step_min": 1e-6,  # transformers raises smaller steps to it, vLLM does not
    },
    "granitemoehybrid": {
        "layer_types": [R, F, R, F],
        "hidden_size": 128,
        "head_dim": None,  # its attention takes no other size than these give
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "attention_multiplier": 32**-0.5,
        "residual_multiplier": 0.7,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {
        "layer_types": [H, H, H],
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "qwen3_next": _DELTA_NET
    | {
        "num_experts": 2,
        "num_experts_per_tok": 2,  # all, so that rounding selects no other
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": _DELTA_NET,
}
"""Model types, each with what distinguishes its tiny model: where layers of full attention lie."""
BFLOAT16 = ("qwen3_next", "qwen3_5_text")
"""Model types that vLLM serves on a CPU in bfloat16 only. Their weights are in bfloat16, and those of the others in float32."""


def write_mixed_model(folder: str | Path, kind: str, *, seed: int = 0, **changes) -> Path:
    """Write a tiny model of a family as transformers saves it, and return its folder.

    Weights are drawn so that attention is selective and the output depends on distant tokens.

    Args:
        folder: folder to write.
        kind: model type, one of FAMILIES.
        seed: seed of the weights.
        changes: further keys of the config.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    options = sizes | FAMILIES[kind] | changes
    # left out rather than null, so that the type's own default holds
    options = {name: value for name, value in options.items() if name != "head_dim" or value is not None}
    layers = options["layer_types"]
    if HYBRID in layers:  # kinds of such a model's layers follow from its type
        del options["layer_types"]
    config = CONFIG_MAPPING[kind](**options, num_hidden_layers=len(layers))
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # biases of recurrent layers are drawn here
        model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_drawn(name, weight, generator))
        for block in model.modules():
            if getattr(block, "scaling", None) == 1.0:  # queries are scaled by their norm alone
                block.q_norm.weight *= block.head_dim**-0.5
        embeddings = model.get_input_embeddings()
        embeddings.weight /= float(getattr(embeddings, "embed_scale", 1.0))  # layers add to vectors of unit mean square
    if kind in BFLOAT16:
        model.bfloat16()
    model.save_pretrained(folder)
    return Path(folder)


def _drawn(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random values of a weight: projections for inputs with unit mean square, norms near their identity."""
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith("sinks"):
        return _SINK + noise
    if weight.dim() == 1:
        selective = _SELECTIVE if "q_norm" in name or "k_norm" in name else 0.0
        return weight + selective + 0.1 * noise
    spreads = {"q_proj": _QK_SPREAD, "k_proj": _QK_SPREAD, "v_proj": _V_SPREAD, "o_proj": _O_SPREAD}
    spreads |= {"lm_head": _LOGIT_SPREAD, "embed_tokens": math.sqrt(weight.shape[1])}
    spread = next((spread for part, spread in spreads.items() if part in name), _MLP_SPREAD)
    return spread / math.sqrt(weight.shape[1]) * noise


class KindsOracle:
    """A model of transformers in float64 whose layers attend as their kinds and a policy say.

    Attributes:
        config: contents of its ``config.json``.
        kinds: kind of each layer.
        layers: number of layers with full attention.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float64):
        """Load the model of ``folder`` in ``dtype``."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.kinds: list[str] = AutoConfig.from_pretrained(folder).layer_types
        self.layers = sum(kind in (FULL, HYBRID) for kind in self.kinds)
        ALL_ATTENTION_FUNCTIONS.register(ORACLE_ATTENTION, self._attend)
        ways = {
            "attn_implementation": ORACLE_ATTENTION,
            "experts_implementation": "eager",
        }  # grouped products are not in float64
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **ways).eval()
        self.arguments = OraclePolicy.full(), None, ()
        self.inputs: Mapping[int, tuple] = {}
        self.result = OracleRun(torch.empty(0), [], [], [], [])
        self.hidden: dict[int, torch.Tensor] = {}
        self.channels: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
                module.register_forward_pre_hook(self._see, with_kwargs=True)
                unrotated = getattr(module, "q_norm", module.q_proj)
                unrotated.register_forward_hook(functools.partial(self._borrow, module))

    def logprobs(
        self, tokens: Sequence[int], policy: OraclePolicy | None = None, inputs: Mapping[int, tuple] | None = None
    ) -> torch.Tensor:
        """Return log-probabilities ``[S, V]`` float64 of a whole sequence. Row t predicts token t + 1.

        Args:
            tokens: S token ids.
            policy: policy of the layers with full attention. Everything is kept if omitted.
            inputs: queries ``[Hq, S, D]``, keys and values ``[H, S, D]`` by which the policy decides in each of these
                layers, with a gate also the input of the attention block ``[S, E]``, by default those of this run. An engine
                decides by its own, which are rounded.
        """
        return self.run(tokens, policy, inputs=inputs).logprobs

    @torch.no_grad()
    def run(
        self,
        tokens: Sequence[int],
        policy: OraclePolicy | None = None,
        visible: Sequence[torch.Tensor] | None = None,
        bias: Sequence[tuple[int, int, int, float]] = (),
        inputs: Mapping[int, tuple] | None = None,
    ) -> OracleRun:
        """Process a whole sequence. Layers are counted among those with full attention.

        Arguments are those of :meth:`kvpop_vllm.testing.oracle.OracleModel.run`, and ``inputs`` of :meth:`logprobs`.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        # names are global, and another oracle may have registered its own function
        ALL_ATTENTION_FUNCTIONS.register(ORACLE_ATTENTION, self._attend)
        self.arguments, self.inputs = (policy or OraclePolicy.full(), visible, bias), inputs or {}
        self.result = OracleRun(torch.empty(0), [], [], [], [])
        logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return replace(self.result, logprobs=logits.log_softmax(-1))

    def greedy(self, tokens: Sequence[int], count: int, policy: OraclePolicy | None = None) -> list[int]:
        """Return ``count`` greedy tokens after a sequence, each computed from the whole sequence."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logprobs(text, policy)[-1].argmax()))
        return text[len(tokens) :]

    def visible(self, layer: int, heads: int, length: int) -> torch.Tensor:
        """Return which tokens queries of a layer without full attention see, ``[H, S, S]`` booleans."""
        q, t = torch.arange(length).unsqueeze(1), torch.arange(length)
        if self.kinds[layer] == SLIDING:
            near = q - t < self.config["sliding_window"]
        else:
            size = self.config["attention_chunk_size"]
            near = q // size == t // size
        return (near & (t <= q)).expand(heads, -1, -1)

    def _see(self, module, positional, named):
        self.hidden[module.layer_idx] = (named["hidden_states"] if "hidden_states" in named else positional[0])[0]

    def _borrow(self, module, projection, inputs, queries):
        """Take the last channel of each KV head's first query out of the queries ``[1, S, ..]`` of a gated layer."""
        layer = module.layer_idx
        if not self.arguments[0].borrows or self.kinds[layer] not in (FULL, HYBRID):
            return None
        heads_first = self.config["model_type"] == "gemma3_text"
        zeroed = (queries.transpose(1, 2) if heads_first else queries).contiguous().clone()
        by_head = zeroed.view(zeroed.shape[1], -1, module.num_key_value_groups, module.head_dim)
        self.channels[layer] = by_head[:, :, 0, -1].T.clone()
        by_head[:, :, 0, -1] = 0
        return zeroed.transpose(1, 2) if heads_first else zeroed

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **options):
        """Attend as a function of transformers does. The mask of the caller is not used."""
        layer, (q, k, v) = module.layer_idx, (x[0] for x in (query, key, value))
        if self.config["model_type"] == "llama4_text":  # scorers see the even channels before the odd ones, as in vLLM
            q, k = (torch.cat([x[..., 0::2], x[..., 1::2]], -1) for x in (q, k))
        factor = scaling * math.sqrt(q.shape[-1])  # the oracle's attention divides by the root of the head size
        q = q * factor
        sinks = options.get("s_aux")
        if self.kinds[layer] in (FULL, HYBRID):
            ordinal = sum(kind in (FULL, HYBRID) for kind in self.kinds[:layer])
            policy, visible, bias = self.arguments
            if policy.borrows:
                q[:: len(q) // len(k), :, -1] = 0
            forced = None if visible is None else visible[ordinal]
            nudged = [(head, token, by) for of_layer, head, token, by in bias if of_layer == ordinal]
            # without the factor, as queries that are given have none
            q_by, k_by, v_by, *hidden_by = self.inputs.get(ordinal, (q / factor, k, v))
            hidden = hidden_by[0] if hidden_by else self.hidden.get(layer)
            options = {"hidden": hidden, "channel": self.channels.get(layer), "sink_logits": sinks, "scale": scaling}
            decided = policy.decide(ordinal, q_by * factor, k_by, v_by, forced, nudged, **options)
            for name in ("visible", "margins", "scores", "lost"):
                getattr(self.result, name).append(getattr(decided, name))
            mixed = policy.attend(q, k, v, decided.visible, sink_logits=sinks)
        else:
            mixed = masked_attention(q, k, v, self.visible(layer, *k.shape[:2]), sink_logits=sinks)
        # transformers takes [B, S, Hq, D]
        return mixed.unflatten(-1, (len(q), -1)).unsqueeze(0), None


def require_distant_kinds(folder: str | Path, *, minimum: float = 0.01) -> None:
    """Check that a model's output depends on tokens that only layers with full attention see, and that these matter.

    Raises:
        AssertionError: a change of a token far back changes the last log-probabilities by less than ``minimum``, a
            small window in the layers of full attention does, or a greedy continuation repeats one token.
    """
    oracle = KindsOracle(folder)
    prompt = random_prompt(300, oracle.config["vocab_size"], seed=1)
    before = oracle.logprobs(prompt)[-1]
    influences = []
    for position in (3, 40, 90, 130):
        changed = [*prompt[:position], (prompt[position] + 1) % oracle.config["vocab_size"], *prompt[position + 1 :]]
        influences.append(float((oracle.logprobs(changed)[-1] - before).abs().max()))
    mean = sum(influences) / len(influences)
    assert mean >= minimum, f"tokens far back change log-probabilities by {mean:.2g} only"
    small = oracle.logprobs(prompt, OraclePolicy.streaming(4, 60, 0))[-1]
    assert float((small - before).abs().max()) >= minimum, "what layers of full attention evict does not matter"
    continuation = oracle.greedy(prompt, 12)
    assert len(set(continuation)) >= 4, f"the greedy continuation is {continuation}"
