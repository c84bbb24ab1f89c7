"""What a run of 06_full_llm_training.py will take, before it starts: steps, tokens, memory. Loads no weights.

    python 06_full_llm_training.py --config experiments/recipes/gsm8k.json --dry-run                     this machine
    python 06_full_llm_training.py --config experiments/recipes/gsm8k.json --dry-run --device-memory 80  a GPU, 80 GiB

A step samples, then trains. Its peak is what is held all the time plus the larger of what these two need:

    held      4 bytes a parameter each for weights and AdamW's two moments; the sampler's copy
    sampling  gradients of the step before; keys and values of every response, layers · (L + T) · 2 · width of the keys;
              logits of one token of each
    training  gradients; what autograd keeps of the largest micro-batch, by layer (`saved_by_layer`); logits, by chunks

06's own functions (--engine plain, uncached) make the logits of all positions at once, and uncached keeps no keys.

Symbols: P prompts, K responses to each, L tokens of a prompt, T tokens of a response.
"""

import math
import os
import pathlib
import types
from dataclasses import dataclass, replace

import torch

from under_the_hood.errors import UserError, one_line, require
from under_the_hood.models import BUILT_IN, character_tokenizer, context_length, encode_prompts, set_chat_options
from under_the_hood.tasks import load_task
from utils import pick_device

# Published shapes, for a machine that cannot reach the hub: layers, hidden size, intermediate size, heads, key/value
# heads, vocabulary, context, and whether the embedding is also the output head. In order of size.
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (30, 576, 1536, 9, 3, 49_152, 8192, True),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (32, 960, 2560, 15, 5, 49_152, 8192, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, 32_768, True),
    "meta-llama/Llama-3.2-1B-Instruct": (16, 2048, 8192, 32, 8, 128_256, 131_072, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, 32_768, True),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (24, 2048, 8192, 32, 32, 49_152, 8192, True),
    "Qwen/Qwen2.5-3B-Instruct": (36, 2048, 11_008, 16, 2, 151_936, 32_768, True),
    "meta-llama/Llama-3.2-3B-Instruct": (28, 3072, 8192, 24, 8, 128_256, 131_072, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18_944, 28, 4, 152_064, 32_768, False),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 4096, 14_336, 32, 8, 128_256, 131_072, False),
    "Qwen/Qwen2.5-14B-Instruct": (48, 5120, 13_824, 40, 8, 152_064, 32_768, False),
    "Qwen/Qwen2.5-32B-Instruct": (64, 5120, 27_648, 40, 8, 152_064, 32_768, False),
}
FLOAT = 4       # bytes of a float32, in which weights, gradients, moments, norms and logits are
USABLE = 0.9    # share of a device's memory to count on; the rest goes to the driver, and to gaps between tensors
CHUNK = 10_000_000   # logits that the trainer makes at a time, as in 06's token_logprobs


@dataclass(frozen=True)
class Setting:
    """What decides on memory beside the flags of a run."""
    length: int                  # L
    width: int = FLOAT           # bytes of a number in matrix products: 2 for bfloat16
    cuda: bool = False
    processes: int = 1           # that share each batch, and with --shard also what is held
    available: float = math.inf  # bytes of the device


# %% ------------------------------------------------------------------------------------------------- the model's shape


def find_model(config):
    """(model config, tokenizer or None, where they come from). UserError when --model is nowhere to be found."""
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, Qwen2Config

    name, options = config.model, {}
    if name in BUILT_IN:
        shape = {k: v for k, v in BUILT_IN[name].items() if k in Qwen2Config().to_dict()}
        tokenizer = character_tokenizer()
        return Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape), tokenizer, "built in"
    if name.endswith(".gguf"):
        require(pathlib.Path(name).is_file(), f"--model {name}: no such file")
        options, name = {"gguf_file": pathlib.Path(name).name}, str(pathlib.Path(name).parent)
    try:
        model_config = AutoConfig.from_pretrained(name, **options).get_text_config()
    except (OSError, ValueError, KeyError, ImportError) as error:
        require(name in SHAPES,
                f"--model {config.model} is neither built in, a directory, a .gguf file, nor reachable on the hub; "
                f"without the hub --dry-run knows {', '.join(SHAPES)} ({one_line(error)})")
        layers, hidden, intermediate, heads, kv_heads, vocabulary, context, tied = SHAPES[name]
        published = (Qwen2Config if name.startswith("Qwen") else LlamaConfig)(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=context,
            tie_word_embeddings=tied)
        return published, None, "the published shape, since the hub is not reachable"
    try:
        return model_config, None if options else AutoTokenizer.from_pretrained(name), "from its config"
    except (OSError, ValueError, KeyError, ImportError):  # a plan can do without a tokenizer
        return model_config, None, "from its config"


def describe(model_config):
    """The numbers that the estimates need, counted on a model without storage. ValueError: it is no causal decoder."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(end.weight): end.weight.numel() for end in (embedding, head)}  # by id: a tied weight counts once
    matrices = {id(module.weight): module.weight.numel() for module in model.modules()
                if getattr(module, "weight", None) is not None and module.weight.dim() == 2
                and not isinstance(module, torch.nn.Embedding)}
    sides = sum(sum(module.weight.shape) for module in model.base_model.modules()
                if isinstance(module, (torch.nn.Linear, Conv1D)))
    heads, hidden = model_config.num_attention_heads, model_config.hidden_size
    kv_heads = getattr(model_config, "num_key_value_heads", None)  # Llama and its kin say how many; GPT-2 does not
    head_size = getattr(model_config, "head_dim", None) or hidden // heads
    intermediate = getattr(model_config, "intermediate_size", None) or getattr(model_config, "n_inner", None)
    return types.SimpleNamespace(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ends=sum(ends.values()), matrices=sum(matrices.values()),  # embedding and head; what matrix products read
        adapter_sides=sides,  # numbers of an adapter of rank 1 beside every matrix but the head
        layers=model_config.num_hidden_layers, hidden=hidden, heads=heads, vocabulary=model_config.vocab_size,
        intermediate=intermediate or 4 * hidden,
        queries=heads * head_size, keys=(kv_heads or heads) * head_size, gated=kv_heads is not None,
        context=context_length(model))


# %% -------------------------------------------------------------------------------------------------------- the memory


def saved_by_layer(shape, *, tokens: int, keys: int, pairs: int, width: int, adapter_rank: int = 0) -> int:
    """Bytes that autograd keeps of one decoder layer until its backward pass.

    tokens: positions that run through it; keys: positions that attention reads, summed over the rows; pairs: of query
    and key, likewise; width: bytes of a number in matrix products, 4 or 2. Norms and residual stream are float32.
    adapter_rank: of adapters beside its matrices, all that trains; then x/rms is not kept, since no weight wants it.

        2 norms       the residual stream x, and x/rms, which the norm's weight is multiplied with
        their output  what q, k, v, gate and up read: in float32 they share it, in bfloat16 each has a cast of its own
        attention     q after RoPE; the output, which o_proj reads; k and v of every key, repeated for the query heads
        its mask      a number for each query-key pair, added to the scores
        MLP           gate, silu(gate), up, and their product, which down_proj reads
    """
    x, mlp = shape.hidden, shape.intermediate
    if shape.gated:
        norms, inputs, inner = 2 * 2 * FLOAT * x, (2 if width == FLOAT else 5) * width * x, 4 * width * mlp
    else:  # GPT-2: layer norm keeps x alone; q, k, v are one product; gelu keeps four numbers, and c_proj its output
        norms, inputs, inner = 2 * FLOAT * x, 2 * width * x, 5 * width * mlp
    attention = 2 * width * shape.queries + FLOAT * shape.heads
    if adapter_rank:  # seven products by the adapters' first halves; in bfloat16 o_proj's adapter casts its own input
        norms, inputs = norms // 2, inputs + 7 * width * adapter_rank + (width < FLOAT) * width * shape.queries
    return tokens * (norms + inputs + attention + inner) + keys * 2 * width * shape.queries + pairs * width


def positions(length: int, new: int, group: int, groups: int, *, again: bool) -> tuple:
    """(tokens, keys, pairs) of a pass as saved_by_layer wants them, and the bytes of fast.py's table of all pairs.

    The trainer has three ways: each response behind a copy of its prompt (again); short groups packed in pairs, which
    attention reads whole; the prompt once, then the responses. The last token of a response predicts nothing.
    """
    responses = groups * group
    if again:
        tokens = responses * (length + new)
        return tokens, tokens, tokens * (length + new), 0
    if length + group * new <= 512:
        row = min(2, groups) * (length + group * (new - 1))
        tokens = math.ceil(groups / 2) * row
        return tokens, tokens, tokens * row, 8 * tokens * row
    queries, keys = responses * (new - 1), groups * length + responses * (length + new - 1)
    return groups * length + queries, keys, groups * length**2 + queries * (length + new - 1), 0


def memory(config, shape, setting: Setting, *, whole_batch: bool = False) -> dict:
    """{phase: {part: bytes}} at the peak of a step, on one device, when every prompt and response has its full length.

    whole_batch: the trainer runs all prompts in one pass, as AEPO does with its second batch.
    """
    length, width, new, group = setting.length, setting.width, config.max_new_tokens, config.group_size
    prompts, narrow = math.ceil(config.prompts_per_step / setting.processes), width < FLOAT
    trained = config.lora_rank * shape.adapter_sides or shape.parameters  # all that train under LoRA are the adapters
    adapters = trained if config.lora_rank else 0
    split = setting.processes if config.shard else 1
    paged = setting.cuda and config.engine in ("auto", "paged")
    own = config.sync_interval > 1 or config.offline or config.shard or paged
    own_width = width if setting.cuda and own and not adapters else FLOAT  # otherwise the policy's own weights sample
    # Autocast keeps what it cast until its end, except in inference mode and of weights that do not train.
    casts = {"bfloat16 copies of the matrices": shape.matrices * width} if narrow else {}
    gradients = trained * FLOAT // split  # a step begins by dropping those of the step before
    parts = {"weights, float32": (shape.parameters + adapters) * FLOAT // split,
             "AdamW's two moments, float32": 2 * trained * FLOAT // split}
    if own:
        precision = "bfloat16" if own_width == 2 else "float32"
        parts[f"the sampler's own weights, {precision}"] = trained * own_width

    questions = min(64, math.ceil(config.eval_questions / setting.processes))  # asked at a time in an evaluation
    rows = max(prompts * group, questions * config.eval_samples)
    position = rows * (length + new) * shape.keys
    key_width = FLOAT if shape.gated and own_width == FLOAT else width  # RoPE makes keys as wide as the weights
    cache = shape.layers * position * (key_width + width)
    if config.engine == "paged":
        cache = min(cache, max(0, setting.available - sum(parts.values()) - gradients) / 2)
    plain, head = config.engine in ("plain", "uncached"), shape.vocabulary * shape.hidden
    read = length + new if config.engine == "uncached" else length if plain else 1  # positions that get logits at once
    sampling = {"gradients of the step before, float32": gradients}
    if config.engine == "uncached":
        sampling["one layer at work"] = rows * read * width * (2 * shape.intermediate + 3 * shape.queries)
    else:
        sampling |= {"keys and values" + ", in pages" * (config.engine == "paged"): cache,
                     "one layer's keys again, as they grow": position * key_width}
    if own_width == FLOAT and narrow:
        sampling |= casts if plain and not adapters else {"the head's weights, cast to bfloat16": head * width}
    sampling["logits and probabilities, float32"] = (4 * FLOAT + (read - 1) * width) * rows * shape.vocabulary

    copies = config.shard or config.gradient_checkpointing  # of the prompt, one for each response
    slots = length * (group if copies else 1) + group * new  # of a group in a pass, by the trainer's own count
    groups = prompts if whole_batch else min(prompts, max(1, config.micro_batch_tokens // slots))
    responses, again = groups * group, copies or plain  # again: the prompt runs with each response
    tokens, keys, pairs, table = positions(length, new, group, groups, again=again)
    layer = saved_by_layer(shape, tokens=tokens, keys=keys, pairs=pairs, width=width, adapter_rank=config.lora_rank)
    kept, layer_backward = shape.layers * layer, 3 * tokens * width * shape.intermediate  # gradients in the MLP
    # Three arrays of logits: themselves, their softmax, its gradient; where weights are cast, a narrow gradient, too.
    logits = min(responses * new, max(1, CHUNK // shape.vocabulary)) * shape.vocabulary * (3 * FLOAT + narrow * width)
    if plain:  # of all positions, and the softmax with what autograd makes of it, of the response's
        logits = (tokens * width + 3 * responses * new * FLOAT) * shape.vocabulary
    head_backward = logits + (0 if adapters else head * FLOAT)  # the head's own gradient
    gathered = shape.ends + 2 * (shape.parameters - shape.ends) // shape.layers  # this block and the next one
    matrices = {"weights gathered from the shards": gathered * width} if config.shard else casts
    if config.gradient_checkpointing:  # a layer's activations and matrices come and go as well
        kept, layer_backward = shape.layers * tokens * FLOAT * shape.hidden, layer + layer_backward
        head_backward += (narrow and head * width) if adapters else sum(matrices.values())
        matrices = {}
    kept += (3 * tokens + responses * new) * FLOAT * shape.hidden  # around the last norm; states that reach the head

    def training(gradients, kept, comes_and_goes):
        return {"gradients, float32": gradients, **matrices, "activations kept for the backward pass": kept,
                "what comes and goes: the head, by chunks, or a layer": comes_and_goes}

    begins = training(gradients, kept, max(head_backward, layer_backward, table))
    ends = training(gradients, kept // shape.layers, layer_backward)
    if groups >= prompts and not whole_batch:  # a single pass has no gradients yet where its backward pass begins
        begins["gradients, float32"] = 0
    phases = {
        "held all the time": parts,
        f"sampling {rows:,} responses at once": sampling,
        f"training on passes of {groups} × {group} responses": max(begins, ends, key=lambda part: sum(part.values()))}
    if config.shard:
        more = max(0, 2 * FLOAT * shape.parameters - sum(parts.values()))
        phases["starting, before the weights are split"] = {"the model and its copy, more than is held later": more}
    return phases


def peak(parts: dict) -> float:
    """Bytes: what is held all the time, and the largest phase, since phases follow each other."""
    held, *phases = (sum(part.values()) for part in parts.values())
    return held + max(phases)


def remedies(config, setting: Setting, *, algorithm):
    """Yield (a change to the command, [(its value, config, setting), …] from mild to strong)."""
    def halved(name, least):
        value = getattr(config, name)
        while value > least:
            value = max(least, value // 2)
            yield value, replace(config, **{name: value}), setting

    shortest = min(config.micro_batch_tokens, setting.length + config.group_size * config.max_new_tokens)
    savings = {"micro_batch_tokens": shortest, "gradient_checkpointing": True, "eval_samples": 1}
    savings = {name: value for name, value in savings.items() if getattr(config, name) != value}  # what is not set yet
    thrifty = replace(config, **savings)
    flags = " ".join(f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
                     for name, value in savings.items())
    splits = algorithm.entropy_target is None and not config.lora_rank  # else --shard is refused
    devices = [n for n in (2, 4, 8, 16, 32, 64)
               if splits and n > setting.processes and config.prompts_per_step % n == 0]
    shard = "more devices:" if config.shard else "--shard, devices:"
    yield "--micro-batch-tokens", [*halved("micro_batch_tokens", shortest)]
    if not config.gradient_checkpointing:
        yield "--gradient-checkpointing", [("", replace(config, gradient_checkpointing=True), setting)]
    if setting.cuda and config.engine != "paged":
        yield "--engine paged", [("", replace(config, engine="paged"), setting)]
    yield "--eval-samples", [*halved("eval_samples", 1)]
    if len(savings) > 1:
        yield flags, [("", thrifty, setting)]
    yield shard, [(n, replace(config, shard=True), replace(setting, processes=n)) for n in devices]
    if savings:
        yield f"{flags} {shard}", [(n, replace(thrifty, shard=True), replace(setting, processes=n)) for n in devices]
    yield "another experiment, --prompts-per-step", [*halved("prompts_per_step", 1)]
    yield "another experiment, --max-new-tokens", [*halved("max_new_tokens", 1)]


# %% ---------------------------------------------------------------------------------------------------------- the plan


def size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def device_of(config):
    """(bytes of memory, inf if unknown; kind of device; its name). --device-memory means a CUDA device of that size."""
    if config.device_memory:
        return config.device_memory * 2**30, "cuda", "a CUDA device"
    device = pick_device(config.device)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return found.total_memory, "cuda", found.name
    known = hasattr(os, "sysconf")  # not on Windows
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else math.inf
    return total, device.type, f"this machine ({device.type})"


def find_task(config):
    """(task or None, a word on it). Data that is not there yet is no mistake in a plan; a malformed file is."""
    if config.task.endswith(".jsonl") and not pathlib.Path(config.task).exists():
        return None, (f'{config.task} is missing; make it with one {{"question": "…", "answer": "…"}} a line, '
                      "before the run")
    try:
        task = load_task(config)
    except UserError as error:
        if config.task != "gsm8k":
            raise
        return None, str(error)
    passes = config.steps * config.prompts_per_step / len(task.train)
    return task, (f"{config.task}: {len(task.train):,} questions to train on, {len(task.evaluation):,} held out; "
                  f"the run passes over them {passes:,.1f} times")


def longest_prompt(config, task, tokenizer, context):
    """(L, a word on it): tokens of the longest question where it can be encoded, else the most that 06 lets through."""
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens)
    require(limit >= 1, f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt "
            f"in the model's context of {context} tokens")
    examples = []
    if tokenizer:
        set_chat_options(tokenizer, config)
    if task and tokenizer:
        examples = sorted(task.train + task.evaluation, key=lambda e: len(e.question))[-32:]
    longest = max((encode_prompts(tokenizer, [e], device="cpu")[0].shape[1] for e in examples), default=0)
    # 0: there is no text to encode, or the tokenizer has no vocabulary.
    return (longest, "the longest") if 0 < longest <= limit else (limit, "the limit")


def dry_run(config, algorithm) -> int:
    """--dry-run: print the plan of a run of this row. Returns the exit status, 3 when the run does not fit."""
    if os.environ.get("RANK", "0") != "0":
        return 0  # torchrun started several of us
    model_config, tokenizer, source = find_model(config)
    try:
        shape = describe(model_config)
    except (ValueError, AttributeError) as error:
        raise UserError(f"--model {config.model} is no ordinary decoder, so there is no plan: "
                        f"{one_line(error)}") from None
    task, words = find_task(config)
    length, which = longest_prompt(config, task, tokenizer, shape.context)
    available, kind, device = device_of(config)
    narrow = config.dtype == "bfloat16" or (config.dtype == "auto" and kind == "cuda")
    setting = Setting(length, width=2 if narrow else FLOAT, cuda=kind == "cuda", available=available,
                      processes=int(os.environ.get("WORLD_SIZE", "1")))
    prompts, group, new = config.prompts_per_step, config.group_size, config.max_new_tokens
    questions = len(task.evaluation) if task else config.eval_questions

    print(f"model     {config.model}: {shape.layers} layers, {shape.parameters:,} parameters, {source}")
    print(f"data      {words}")
    print(f"a step    at most {prompts * (length + group * new):,} tokens: {prompts} prompts of {length} ({which}) "
          f"and {group} responses of {new} to each")
    print(f"a run     {config.steps:,} optimizer steps, {config.steps * prompts * group:,} rollouts"
          + f", or up to {1 + config.refills} times as many with --refills {config.refills}" * algorithm.refill
          + f"; {1 + math.ceil(config.steps / config.eval_every)} evaluations of {questions} questions, "
          f"{config.eval_samples} + 1 answers to each" + "; all of it for each row of --compare" * bool(config.compare))

    def estimate(config, setting):
        return memory(config, shape, setting, whole_batch=algorithm.entropy_target is not None)

    parts, usable = estimate(config, setting), USABLE * available
    print(f"memory    an estimate with every response at its full length, {'bfloat16' if narrow else 'float32'} compute"
          + f", on each of {setting.processes} devices" * (setting.processes > 1))
    for phase, numbers in parts.items():
        print(f"{size(sum(numbers.values())):>14}  {phase}")
        for part, count in numbers.items():
            print(f"{size(count):>18}  {part}")
    needed = peak(parts)
    print(f"{size(needed):>14}  at the peak: what is held, and the largest of the rest, which take turns")
    own = sum([*parts["held all the time"].values()][2:])  # of the sampler
    trained = config.lora_rank * shape.adapter_sides or shape.parameters
    print(f"disk      {size(3 * FLOAT * trained + own)} for a checkpoint, "
          "and as much again while the next is written")
    if available == math.inf:
        print(f"device    {device}, of unknown memory: say how much there is with --device-memory GiB")
        return 0
    verdict = "fits" if needed <= usable else "does NOT fit"
    print(f"device    {device}, {size(available)}, of which {USABLE:.0%} count. The run {verdict}")
    if needed <= usable:
        return 0
    totals = [sum(numbers.values()) for numbers in parts.values()]
    over = [(phase.split()[0].strip(","), totals[0] + count * (phase != "held all the time"))
            for phase, count in zip(parts, totals, strict=True)]
    too_large = ", ".join(f"{phase} ({size(count)})" for phase, count in over if count > usable)
    print(f"too large {too_large}. It would be")
    for change, steps in remedies(config, setting, algorithm=algorithm):
        tried = [(value, peak(estimate(changed, other))) for value, changed, other in steps]
        enough = [pair for pair in tried if pair[1] <= usable]
        value, count = enough[0] if enough else min(tried, key=lambda pair: pair[1], default=("", needed))
        if count < needed and (enough or "another" not in change):
            print(f"{size(count):>14}  {'and fit' if enough else 'too much still'}, with {change} {value}".rstrip())
    return 3
