"""Ledger of everything in vLLM's modules that this package changes; :mod:`kvpop_vllm.vllm_glue.install` puts it in place.

Registered extension points come first. Functions without one are wrapped. Without a policy each wrapper calls the
original with unchanged arguments and returns its result. Exceptions are sampling on a CPU with seeds and with drafts,
which vLLM does wrongly, and copies of blocks, which it does slowly: engines without a policy that start in the process of
one with a policy are mended too.
"""

from dataclasses import dataclass

EVERY, FRONT_END, SCHEDULER, WORKER, FALLBACK = "every process", "front end", "scheduler", "worker", "fallback"
"""Processes of a server, which an engine may run as one; the last is any process whose vLLM does not fit."""
WRAPPED, ADDED, REGISTERED = "wrapped", "added", "registered"


@dataclass(frozen=True)
class Patch:
    """A row of the ledger.

    Attributes:
        target: ``module:function``, ``module:Class.method`` or ``module:TABLE`` of vLLM.
        wrapper: ``module:function`` below :mod:`kvpop_vllm.vllm_glue`, which is imported when the row is put in place.
            It wraps the target, is the added method, or registers what the table then holds.
        process: process in which the row is put in place.
        when: condition for this, a key of :data:`kvpop_vllm.vllm_glue.install.CONDITIONS`.
        why: the reason for the row, and what it does.
        goes: the condition under which the row can be removed.
        takes: parameters that a wrapper relies on. Those before ``*`` come first and in this order, those after it
            have these names; all other parameters are passed through.
        kind: what happens to the target.
        opens: process whose rows the wrapper puts in place, by its first argument, empty for none.
    """

    target: str
    wrapper: str
    process: str
    when: str
    why: str
    goes: str
    takes: str = ""
    kind: str = WRAPPED
    opens: str = ""


# fmt: off
LEDGER = (
    # when vLLM loads the plugin
    Patch("vllm.engine.arg_utils:EngineArgs.add_cli_args", "start.flags:add_cli_args", EVERY, "always",
          "vLLM has no way for a plugin to add engine flags: adds the --kv-* group after vLLM's own.",
          "when plugins can register engine arguments", "parser"),
    Patch("vllm.engine.arg_utils:EngineArgs.from_cli_args", "start.flags:from_cli_args", EVERY, "always",
          "The parser of the flags merges them into additional_config; arguments that no such parser made are merged here.",
          "with the one above", "cls, args"),
    Patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", "start.engine_config:create_engine_config", EVERY, "always",
          "The only point between the arguments and the loading of weights: refuses keys of additional_config that are misspelt; serves "
          "KVpop checkpoints of other authors as their base, without their code; with a policy, refuses what cannot work, switches prefix "
          "caching on where prompts are protected or snapshots are taken and off elsewhere and, for models of DMS, names the class that leaves their projections out.",
          "when platforms consult a backend's validate_configuration on CPU too (vLLM issue 42449 is about such hooks)", "self", opens=FRONT_END),
    Patch("vllm.v1.executor.abstract:Executor.get_kv_cache_specs", "start.refusals:get_kv_cache_specs", EVERY, "always",
          "A layer may bring an attention backend of its own, which is not asked for a policy, and vLLM would serve it with a dense cache: "
          "with a policy, refuses layers whose cache is not what their kind has, and chooses the slots of a block for all groups of layers. "
          "The scheduler is made after this.",
          "when a backend sees the specs of all layers", "self", opens=SCHEDULER),
    Patch("vllm.v1.attention.selector:_cached_get_attn_backend", "start.backend_choice:cached_get_attn_backend", EVERY, "always",
          "The choice of a backend class is cached per process under a key that knows nothing of policies: engines of one process would "
          "get each other's. With a policy its cache is emptied before and after; refuses configs that no EngineArgs have made, for which "
          "a GPU's platform chooses a backend of vLLM's.",
          "when the key holds additional_config, and platforms ask plugins about configs", "*, backend, attn_selector_config", opens=WORKER),
    Patch("vllm.model_executor.layers.attention.chunked_local_attention:get_attn_backend", "start.backend_choice:chunked_backend", EVERY, "always",
          "A layer with chunked attention asks for a backend as one with full attention does: with a policy it gets vLLM's. It may be the "
          "first layer, for which nothing is installed before.",
          "when the request says so, as it does for sliding windows"),
    Patch("vllm.v1.attention.backends.registry:_ATTN_OVERRIDES", "start.backend_choice:register", EVERY, "always",
          "vLLM's extension point: CPU_ATTN and CUSTOM are paths that resolve for each engine, without a policy to what they were.",
          "never", kind=REGISTERED),
    Patch("vllm.model_executor.models.registry:ModelRegistry.models", "start.engine_policy:register_models", EVERY, "always",
          "vLLM's extension point: model classes of full checkpoints.", "never", kind=REGISTERED),

    # in a front end, when it has made a config
    Patch("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "run.admission:process_inputs", FRONT_END, "policy",
          "Requests that stream their input rewind the sequence: refuses them. Requests may ask for a budget of their own: checks what "
          "they ask, and resolves it into the numbers that travel with their sampling parameters.",
          "when a KV cache spec can refuse, and plugins can check sampling parameters", "self, *, prompt, lora_request, resumable"),
    Patch("vllm.v1.engine.async_llm:AsyncLLM.generate", "run.admission:generate", FRONT_END, "policy",
          "A generator does nothing before it is asked, and an answer that is streamed has begun by then: what a request asks of its cache "
          "is checked when the generator is made, so that a refusal is HTTP 400 there too.",
          "when plugins can check sampling parameters", "self, prompt, sampling_params, *, lora_request"),
    Patch("vllm.v1.metrics.loggers:StatLoggerManager.__init__", "extras.metrics:add_logger", FRONT_END, "policy",
          "A plugin in vllm.stat_logger_plugins cannot decline a config, and switches statistics on where --disable-log-stats is given, "
          "also without a policy: our logger is added to engines with one.",
          "when stat logger plugins can decline a config", "self, vllm_config"),
    Patch("vllm.renderers.base:BaseRenderer.render_chat", "extras.cartridge_names:render_chat", FRONT_END, "cartridges",
          "An input of the engine does not say whether a client or a chat template wrote its first ids: chats are marked, since after a "
          "cartridge that holds a text's beginning they go without BOS.",
          "when inputs say so", "self"),
    Patch("vllm.renderers.base:BaseRenderer.render_chat_async", "extras.cartridge_names:render_chat_async", FRONT_END, "cartridges",
          "The same of servers.", "with the one above", "self"),
    Patch("vllm.entrypoints.openai.models.serving:OpenAIServingModels.init_static_loras", "extras.cartridge_routes:init_static_loras", FRONT_END, "cartridges",
          "Only base models and LoRA adapters are listed as models: cartridges are listed as adapters are.",
          "when plugins can add models", "self"),
    Patch("vllm.entrypoints.launchers.app:attach_endpoint_plugins", "extras.cartridge_routes:attach_endpoint_plugins", FRONT_END, "loading cartridges",
          "Endpoint plugins load only where VLLM_PLUGINS names them, and warn at every start elsewhere: the routes that load cartridges are "
          "added where vLLM adds those that load LoRA adapters.",
          "when endpoint plugins can ask for another condition", "app"),
    Patch("vllm.entrypoints.launchers.app:attach_endpoint_plugins", "extras.inspect_routes:attach_endpoint_plugins", FRONT_END, "inspect page",
          "The same of the routes of the inspect page.", "with the one above", "app"),
    Patch("vllm.entrypoints.generate.api_router:init_generate_state", "start.front_ends:init_generate_state", FRONT_END, "HTTP server",
          "A server has several processes, and vLLM does not compare their configs: a front end whose flags are missing in its config, or "
          "whose engines have other settings, ends here.",
          "when plugins can register engine arguments, and vLLM compares configs of front ends and engines", "engine_client, state, args"),

    # in an engine core, before it makes its scheduler
    Patch("vllm.v1.kv_cache_spec_registry:_REGISTRY_KVCACHESPEC_LIST", "run.cache_spec:register", SCHEDULER, "policy",
          "vLLM's extension point: the spec of a fixed-budget cache and its block manager.", "never", kind=REGISTERED),
    Patch("vllm.v1.core.kv_cache_manager:KVCacheManager.__init__", "run.manager_requests:make_managers", SCHEDULER, "policy",
          "The block manager of a cache group does not know the others, and a snapshot holds blocks of all groups: ours share one store.",
          "when cache managers are handed their coordinator", "self"),
    Patch("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", "run.manager_requests:get_computed_blocks", SCHEDULER, "policy",
          "A cache manager is told of a request's name only: ours learns what each asked for and how long its prompt is, and a hit that "
          "reaches beyond what it protects is cut.",
          "when cache managers are handed the request", "self, request"),
    Patch("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks", "run.manager_requests:cache_blocks", SCHEDULER, "policy",
          "Blocks are shared by the hash of their tokens, and keys of unprotected tokens depend on what was evicted, in windows too: only "
          "blocks of protected tokens are hashed. Snapshots of prompts are taken here, when a step's blocks are there.",
          "when cache managers can bound what is hashed in all groups, and are handed the request", "self, request, num_computed_tokens"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule", "run.manager_requests:update_after_schedule", SCHEDULER, "policy",
          "A round of eviction comes between two steps, and drafts may lie on both sides of it: those of a step are cut there. So are "
          "prompts where a snapshot is due, and on a CPU drafts of requests whose last ones were refused. Later, the scheduler counts its tokens as computed.",
          "when cache managers can bound the tokens of a request's step", "self, scheduler_output"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._free_request", "extras.reports:free_request", SCHEDULER, "policy",
          "Only here is a request's cache known at its end: its numbers are kept for the metrics, and returned with the response to "
          "requests that ask for a report.",
          "when cache managers can add to a response and to the scheduler's statistics", "self, request"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._free_request", "run.manager_requests:free_request", SCHEDULER, "policy",
          "Cache managers are told of a request's name only when it ends: a snapshot of its blocks needs its tokens too.",
          "when cache managers are handed the request", "self, request"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache", "run.manager_requests:reset_prefix_cache", SCHEDULER, "policy",
          "vLLM forgets nothing while a request holds blocks: snapshots are dropped then too, and none is taken of such a request.",
          "when a reset drops what it can", "self"),
    Patch("vllm.v1.engine.core:EngineCore.collective_rpc", "run.manager_requests:collective_rpc", SCHEDULER, "policy",
          "Weights are reloaded by a method of the workers of any name, of which the scheduler is not told: snapshots are of the old ones, "
          "and so are later ones of requests that hold blocks.",
          "when the scheduler is told that weights change", "self"),
    Patch("vllm.v1.engine.core:EngineCore.add_lora", "run.manager_requests:add_lora", SCHEDULER, "policy",
          "The same of an adapter that is loaded in place of one of its name.", "with the one above", "self, lora_request"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.make_stats", "extras.reports:make_stats", SCHEDULER, "policy",
          "The scheduler's statistics have no room for others: ours travel in the field of KV connectors, which are refused.",
          "with the one above", "self"),
    Patch("vllm.v1.engine.core:EngineCore.kvpop_settings", "start.front_ends:settings", SCHEDULER, "policy",
          "A front end calls methods of its engine by name: this one returns the settings with which the engine runs.",
          "when vLLM compares configs of front ends and engines", kind=ADDED),
    Patch("vllm.v1.engine.core:EngineCore.preprocess_add_request", "start.front_ends:preprocess_add_request", SCHEDULER, "policy",
          "A front end without the policy, as on another node, checks nothing: its requests fail.",
          "when vLLM compares configs of front ends and engines", "self, request"),
    Patch("vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size", "extras.cartridges:load_first", SCHEDULER, "cartridges",
          "The first step of an engine's start that has workers and block managers: cartridges are loaded into blocks of the pool.",
          "when plugins can put blocks into the pool", "self"),
    Patch("vllm.v1.engine.core:EngineCore.preprocess_add_request", "extras.cartridges:preprocess_add_request", SCHEDULER, "cartridges",
          "A request that names a cartridge that the engine does not have fails alone; later it would stop the engine.",
          "with the one above", "self, request"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache", "extras.cartridges:reset_prefix_cache", SCHEDULER, "cartridges",
          "vLLM forgets its prefix cache only while nobody holds blocks: those of cartridges are let go meanwhile.",
          "when blocks can be held that a reset leaves alone", "self"),
    Patch("vllm.v1.engine.core:EngineCore.kvpop_load_cartridge", "extras.cartridges:load", SCHEDULER, "cartridges",
          "A front end calls it for the route that loads a cartridge.", "with that route", kind=ADDED),
    Patch("vllm.v1.engine.core:EngineCore.kvpop_unload_cartridge", "extras.cartridges:unload", SCHEDULER, "cartridges",
          "A front end calls it for the route that unloads a cartridge.", "with that route", kind=ADDED),
    Patch("vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size", "extras.inspector:start", SCHEDULER, "inspect page",
          "The recorder of the inspect page learns how to ask workers.", "when plugins can reach the workers", "self"),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", "extras.inspector:update_from_output", SCHEDULER, "inspect page",
          "Only between a step and the end of its requests is their cache known: what it holds is recorded.",
          "when plugins are called after a step", "self, scheduler_output"),
    Patch("vllm.v1.engine.core:EngineCore.kvpop_inspect", "extras.inspector:summaries", SCHEDULER, "inspect page",
          "A front end calls it for the numbers of all requests.", "with the routes of the page", kind=ADDED),
    Patch("vllm.v1.engine.core:EngineCore.kvpop_inspect_request", "extras.inspector:details", SCHEDULER, "inspect page",
          "A front end calls it for what one request holds.", "with the routes of the page", kind=ADDED),

    # in a worker, before it chooses the backend of a layer
    Patch("vllm.v1.kv_cache_spec_registry:_REGISTRY_KVCACHESPEC_LIST", "run.cache_spec:register", WORKER, "policy",
          "As in the scheduler's process: a worker checks that the specs of its layers are registered.", "never", kind=REGISTERED),
    Patch("vllm.model_executor.model_loader.base_loader:process_weights_after_loading", "run.gated_attention:process_weights", WORKER, "gate",
          "Attention layers see queries, keys and values, and gates read hidden states: in a model that has been built, layers of the policy "
          "are given room for their gates, and the modules around them hand over their input.",
          "when attention layers are handed hidden states", "model"),
    Patch("vllm.compilation.decorators:_try_load_aot_compiled_fn", "run.compile_cache:try_load", WORKER, "CPU",
          "vLLM cannot load what it compiled and saved, and each start would compile for a minute: with a policy, torch's artefact gets "
          "the method that vLLM calls on its own.",
          "when vLLM loads such artefacts", "model"),
    Patch("vllm.compilation.caching:aot_compile_hash_factors", "run.compile_cache:hash_factors", WORKER, "CPU",
          "The key of that cache holds all of additional_config, though the compiled graph depends neither on the budget nor on the "
          "scorer: with a policy, only its name and the make of its gate count.",
          "when a plugin can name its own factors", "vllm_config"),
    Patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", "run.cpu_seeds:sample", WORKER, "CPU",
          "A request with a seed whose prompt is read in chunks stops the engine: the states of the generators whose draws are discarded "
          "are kept.",
          "when draws of unfinished prompts are not made, or are taken back on CPUs too", "self"),
    Patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync", "run.cpu_seeds:bookkeeping_sync", WORKER, "CPU",
          "And set again, in place of an offset that generators of a CPU do not have.", "with the one above", "self"),
    Patch("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", "run.cpu_drafts:expand_batch_to_tokens", WORKER, "CPU",
          "On a CPU drafts of sampled requests are judged under no temperature, top-k or top-p, but under what lay in memory: their numbers "
          "are copied to the drafts.",
          "when vLLM's kernel for a CPU copies numbers of other types than int64", "x, cu_num_tokens, num_tokens, replace_from, replace_to"),
    Patch("vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids", "run.cpu_zeros:zero_block_ids", WORKER, "CPU",
          "On a CPU only blocks of full attention are zeroed, and windows read what a policy's blocks have left: blocks of all layers "
          "that the policy does not act on are zeroed.",
          "when a CPU zeroes the blocks of all kinds of attention, as a GPU does", "self, block_ids"),
    Patch("vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._get_model", "start.backend_choice:load_draft_model", WORKER, "policy",
          "A draft model has the additional_config of the model that it drafts for, and asks for backends in the same way: with a policy "
          "its layers get vLLM's, and dense caches in groups of their own.",
          "when a backend is asked for with the config of the layer's model"),
    Patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache", "run.block_copies:initialize_kv_cache", WORKER, "policy",
          "Of the layers that share the bytes of a block, vLLM copies what the first one has of it, without the padding of its page, where "
          "another layer has scores and positions: the largest comes first.",
          "when vLLM copies whole pages", "self"),
    Patch("vllm.v1.worker.gpu_model_runner:copy_kv_cache_blocks_inplace", "run.block_copies:copy_kv_cache_blocks_inplace", WORKER, "CPU",
          "Blocks are copied by indexing bytes, which takes a CPU several times as long as words of eight bytes.",
          "when vLLM copies blocks of a CPU in words", "kv_caches, num_blocks, kv_cache_block_copies"),
    Patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata", "run.step_requests:build_attention_metadata", WORKER, "policy",
          "Attention metadata do not say how long a request's prompt is, what it asked for, its seed, nor which tokens are drafts: the "
          "runner's own numbers are handed to the metadata builder first.",
          "when common attention metadata hold prompt lengths, as they do for reference sliding windows",
          "self, num_tokens, num_reqs, *, use_spec_decode"),
    Patch("vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model", "start.backend_choice:load_draft_model", WORKER, "model runner V2",
          "The same of model runner V2.", "with the one above"),
    Patch("vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache", "run.block_copies:initialize_kv_cache", WORKER, "model runner V2",
          "The same of model runner V2.", "with the one above", "self"),
    Patch("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn", "run.step_requests:prepare_attn", WORKER, "model runner V2",
          "The same of model runner V2.", "with the one above", "self, input_batch"),
    Patch("vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests", "run.step_requests:add_requests", WORKER, "model runner V2",
          "Model runner V2 does not keep what a request asked for: it is kept next to it.", "when it keeps extra_args", "self, scheduler_output"),
    Patch("vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests", "run.step_requests:finish_requests", WORKER, "model runner V2",
          "And forgotten when the request is done.", "with the one above", "self, scheduler_output"),

    # in every process, instead of all of the above, where vLLM does not fit
    Patch("vllm.config.vllm:VllmConfig.__init__", "start.fallback:init_config", FALLBACK, "always",
          "A policy would have no effect: refuses it.", "when vLLM refuses keys of additional_config that nobody reads"),
    Patch("vllm.config.vllm:VllmConfig.__setstate__", "start.fallback:restore_config", FALLBACK, "always",
          "The same of engine cores and workers, which get the config by pickle.", "with the one above"),
)
# fmt: on
FUNCTIONS = tuple(row for row in LEDGER if row.kind == WRAPPED and row.process != FALLBACK)
"""Functions of vLLM without which the package does not fit it."""
