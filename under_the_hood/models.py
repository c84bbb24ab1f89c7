"""Load any causal language model, write prompts in its format, and make the built-in models."""

import contextlib
import copy
import functools
import hashlib
import inspect
import json
import math
import pathlib
from dataclasses import replace

import torch

from under_the_hood import lora, parallel
from under_the_hood.answers import THOUGHTS
from under_the_hood.errors import UserError, one_line, require
from under_the_hood.runs import redraw_seconds, replace_folder
from under_the_hood.tasks import addition_examples, digits_of, worked_steps


def load_model(name: str, *, device, cache_dir=None, task: str = "addition"):
    """(model, tokenizer) in float32 and eval mode, with a pad token. name: built in, hub, directory or .gguf file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough, and it is ours
    if name in BUILT_IN:
        folder = built_in_model(built_in_digits(task), cache_dir, name=name, device=device)
        return load_model(str(folder), device=device)
    path, options = pathlib.Path(name), {}
    require(not (path / "adapter_config.json").exists(),
            f"--model {name} holds an adapter; merge it into its base first, or take the model/ of its run")
    if name.endswith(".gguf"):
        require(path.is_file(), f"--model {name}: no such file")
        options, name = {"gguf_file": path.name}, str(path.parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if options or isinstance(error, ImportError):
            raise UserError(f"--model {path}: {one_line(error)}")
        raise UserError(f"--model {name} is neither 'tiny', a model directory, a .gguf file, nor reachable on the hub: "
                        f"{one_line(error)}")
    if options:  # a model read from a .gguf cannot be saved again: put its weights into an ordinary one
        if hasattr(model.config, "quantization_config"):  # no longer true: they were expanded to float32
            del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.tie_weights()
        model = plain
    known = range(model.get_input_embeddings().num_embeddings)
    special = {tokenizer.pad_token_id, tokenizer.unk_token_id}  # some tokenizer classes invent one beyond it
    if tokenizer.pad_token_id not in known:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths, never from the pad id
    require(tokenizer.pad_token_id in known,
            f"--model {path}: its tokenizer has neither a pad nor an end-of-text token that the model knows; "
            "name one in tokenizer_config.json")
    require(not {*tokenizer.get_vocab().values()} - {*known} - special,
            f"--model {path}: its tokenizer has {len(tokenizer)} tokens and its embedding {len(known)} rows; "
            "resize_token_embeddings() and save it again")
    leave_out_auxiliary_loss(model)
    return model.to(device).eval(), tokenizer


def leave_out_auxiliary_loss(model) -> None:
    """Switch off the loss that balances a mixture's experts: it is no part of the policy gradient."""
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False


def stop_ids(model, tokenizer) -> set:
    """Every id that ends a response: the tokenizer's EOS and those of the model's generation config."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, (list, tuple)) else [configured]
    return {int(i) for i in [*configured, tokenizer.eos_token_id] if i is not None}


def context_length(model):
    """The longest sequence, in tokens. Where a model changes its rotary frequencies behind some length (longrope), it
    ends there: keys that were cached before would not be those that training computes."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = [getattr(config, "max_position_embeddings", None)]
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # a set for each kind of layer
        if kind.get("rope_type") == "longrope":
            lengths += [(where or {}).get("original_max_position_embeddings") for where in (kind, vars(config))]
    return min((length for length in lengths if length and length > 0), default=math.inf)


def sliding_window(model):
    """The shortest attention window of any layer, in tokens."""
    config = model.config.get_text_config()
    names = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size")
    return min((w for w in (getattr(config, name, None) for name in names) if w), default=math.inf)


def chat_switches(config) -> dict:
    """--chat-template-kwargs."""
    try:
        return dict(json.loads(config.chat_template_kwargs).items())
    except (ValueError, AttributeError):
        raise UserError(f"--chat-template-kwargs is {config.chat_template_kwargs!r}; it must be a JSON object, such as "
                        "'{\"enable_thinking\": false}'") from None


def set_chat_options(tokenizer, config) -> None:
    """--system-prompt and --chat-template-kwargs, for every prompt that this tokenizer is to make."""
    switches = chat_switches(config)
    require(tokenizer.chat_template or not (switches or config.system_prompt),
            "--system-prompt and --chat-template-kwargs are for chat models, and this tokenizer has no chat template")
    ours = {"tokenize", "conversation", "add_generation_prompt", "continue_final_message", "return_dict"} & {*switches}
    require(not ours, f"--chat-template-kwargs sets {', '.join(sorted(ours))}, which is not for the user to choose")
    tokenizer.chat_options = (config.system_prompt, switches)


def encode_prompts(tokenizer, examples, *, device, worked=()):
    """Left-padded (ids, mask), each (P, L). A chat template, where there is one, also places the one BOS.

    worked: solved examples to show before each question, in the same form; a question is never its own example.
    """
    shown = [[other for other in worked if other.question != example.question] for example in examples]
    if tokenizer.chat_template:
        system, switches = getattr(tokenizer, "chat_options", (None, {}))
        chats = []
        for example, others in zip(examples, shown):
            turns = [("system", system)] if system else []
            turns += [turn for other in others for turn in (("user", other.question), ("assistant", other.answer))]
            chats.append([{"role": role, "content": content} for role, content in [*turns, ("user", example.question)]])
        try:
            rows = [tokenizer.apply_chat_template(chat, **switches, add_generation_prompt=True, return_dict=False)
                    for chat in chats]
        except Exception as error:  # noqa: BLE001 (whatever a template or one of its switches may raise)
            raise UserError(f"the chat template refuses this prompt ({one_line(error)}); see --system-prompt and "
                            "--chat-template-kwargs") from None
    else:
        def solved_text(other):
            if other.terse:
                return f"{other.terse}{other.answer};"
            return f"Question: {other.question}\nAnswer: {other.answer}\n\n"

        solved = ["".join(map(solved_text, others)) for others in shown]
        rows = tokenizer([text + (example.terse or f"Question: {example.question}\nAnswer:")
                          for text, example in zip(solved, examples)])["input_ids"]
        end = tokenizer.eos_token_id  # some tokenizers end every text with it, and a prompt must go on
        rows = [ids[:-1] if end is not None and len(ids) > 1 and ids[-1] == end else ids for ids in rows]
    width = max(len(ids) for ids in rows)
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + list(ids) for ids in rows], device=device)
    lengths = torch.tensor([len(ids) for ids in rows], device=device)
    return tokens, torch.arange(width, device=device) >= width - lengths[:, None]


def control_ids(tokenizer) -> tuple[set, set]:
    """(ids that are never text, ids that are no text at the end of a response, where they are stop ids of the model).

    Tags are text, for a reward may ask for them: special tokens in pairs such as <think> and </think>, except those
    with which the chat template frames a turn, such as [INST] and [/INST].
    """
    special = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    pairs = {text.replace("/", "") for text in special.values() if "/" in text} & {*special.values()}
    tags = {i for i, text in special.items() if text.replace("/", "") in pairs}

    def rendered(*roles):
        with contextlib.suppress(Exception):  # a template may refuse a system message, with an error of any class
            chat = [{"role": role, "content": "a"} for role in roles]
            return special.keys() & tokenizer.apply_chat_template(chat, return_dict=False)
        return set()

    asked, answered = ("system", "user"), ("system", "user", "assistant", "user")
    if tokenizer.chat_template:  # around an answer some templates write empty thoughts, which are no frame
        frame = (rendered(*asked) or rendered(*asked[1:])) | (rendered(*answered) or rendered(*answered[1:])) - tags
    else:
        frame = set()
    named = {getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "cls", "sep")}
    return named | frame, special.keys() - tags


def decode(tokenizer, tokens, mask, prompt=None) -> list:
    """The text of each response as its reward is to see it: with tags, without what only steers the model.

    prompt: (P, L) ids. A chat template may open a thought there; then the text of each response begins with that tag,
    or one that is cut off within its thought would pass for an answer.
    """
    control, stops = control_ids(tokenizer)
    rows = [tuple(ids[:n]) for ids, n in zip(tokens.tolist(), mask.sum(1).tolist())]
    distinct = list(dict.fromkeys(rows))  # responses of a group are often equal
    kept = [[i for i in (ids[:-1] if ids and ids[-1] in stops else ids) if i not in control] for ids in distinct]
    texts = dict(zip(distinct, tokenizer.batch_decode(kept, skip_special_tokens=False)))
    templated = prompt is not None and tokenizer.chat_template
    ending = tokenizer.decode(prompt[0, -16:]).rstrip() if templated else ""
    opened = next((start for start, _ in THOUGHTS if ending.endswith(start)), "")
    return [opened + texts[ids] for ids in rows]


def drop_long_prompts(task, model, tokenizer, config):
    """The task without questions longer than --max-prompt-tokens, or too long to leave room for --max-new-tokens."""
    context = context_length(model)
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens)
    require(limit > 0, f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt "
            f"in the model's context of {context} tokens")

    def fits(example):
        return encode_prompts(tokenizer, [example], device="cpu")[0].shape[1] <= limit

    def short(examples):
        if task.name.startswith("addition"):  # many, and of nearly the same length: the first stands for all
            return examples if fits(examples[0]) else []
        return [example for example in examples if fits(example)]

    kept = replace(task, train=short(task.train), evaluation=short(task.evaluation))
    require(bool(kept.train and kept.evaluation),
            f"no question of {task.name} fits into {limit} tokens: --max-prompt-tokens {config.max_prompt_tokens}, "
            f"--max-new-tokens {config.max_new_tokens}, the model's context {context}")
    if dropped := len(task.train) - len(kept.train):
        parallel.print_rank0(f"left out {dropped} training questions longer than {limit} tokens")
    return kept


def model_inputs(model, tokens, attention_mask, cache=None, *, use_cache=True) -> dict:
    """Keyword arguments for one forward pass that continues `cache`. attention_mask covers cache and tokens.

    Positions count real tokens only, so that left padding does not shift them. With GPT-2's learned positions a shift
    would change the results without any error.
    """
    accepted = forward_parameters(type(model))
    inputs = {"input_ids": tokens, "attention_mask": attention_mask, "use_cache": use_cache,
              "cache" if "cache" in accepted else "past_key_values": cache}  # renamed in transformers 5.24
    if "position_ids" in accepted:
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1]:]
    return inputs


def next_cache(output):
    """The keys and values that a forward pass leaves for the next one."""
    return output["cache"] if "cache" in output else output.get("past_key_values")


@functools.cache
def forward_parameters(model_class) -> frozenset:
    return frozenset(inspect.signature(model_class.forward).parameters)


def in_eval_mode(function):
    """Run function(model, …) in eval mode, and leave the model in the mode it was in.

    In training mode dropout would make the trainer's log-probabilities differ from the sampler's, and with gradient
    checkpointing a model uses no cache. One exception: gradient checkpointing while gradients are wanted. It acts in
    training mode only, and the backward pass recomputes in that mode, too. So the model is put into training mode and
    stays there; `recompute_activations` has removed its dropout.
    """
    @functools.wraps(function)
    def wrapped(model, *args, **kwargs):
        was_training, checkpoints = model.training, torch.is_grad_enabled() and recomputes(model)
        if was_training != checkpoints:
            model.train(checkpoints)
        try:
            return function(model, *args, **kwargs)
        finally:
            if not checkpoints and model.training != was_training:
                model.train(was_training)
    return wrapped


def without_autograd(function):
    """Run function in inference mode, which costs less than no_grad, and hand its tensors on as ordinary ones."""
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with torch.inference_mode():
            results = function(*args, **kwargs)
        return tuple(tensor.clone() for tensor in results)
    return wrapped


RANDOM_NUMBERS = ("drop", "jitter", "noise")  # parts of the names of what is random in training mode


def recompute_activations(model) -> None:
    """Gradient checkpointing: backward recomputes each block from its input. UserError where a model does not offer it.

    It acts in training mode only, where dropout, dropped layers and jittered routers would part the trainer from the
    sampler; so all of these are taken out of the model.
    """
    try:
        new_name = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.24
        (new_name or model.gradient_checkpointing_enable)()
    except (ValueError, AttributeError) as error:
        raise UserError(f"--gradient-checkpointing: {one_line(error)}") from None
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and any(part in name for part in RANDOM_NUMBERS):
                setattr(module, name, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def recomputes(model) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextlib.contextmanager
def recomputing(model, on: bool):
    """With gradient checkpointing on or off, for a comparison."""
    modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    was_training = model.training
    for module in modules:
        module.gradient_checkpointing = on
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True
        model.train(was_training)


def autocast_dtype(config, device):
    return torch.bfloat16 if config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda") else None


def autocast(config, device):
    """bfloat16 matrix products on float32 weights, where asked for; log-softmax, ratios and losses stay float32."""
    dtype = autocast_dtype(config, device)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


# The built-in models: Qwen2, but small. "steps": of supervised training, by digits; "wrong_share": of its examples.
TINY = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "wrong_share": 0.6, "steps": {1: 200, 2: 700, 3: 1500},
        "batch": 256, "learning_rate": 2e-3}


SMALL = {**TINY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 8, "max_position_embeddings": 128, "steps": {4: 800}, "batch": 512,
         "learning_rate": 1e-3}


BUILT_IN = {"tiny": TINY, "small": SMALL}


def built_in_digits(task: str) -> int:
    """The digits that the built-in model for this task has learned: 2 for any task other than addition."""
    return digits_of(task) if task.startswith("addition") else 2


def built_in_model(digits: int, cache_dir, *, name: str = "tiny", device="cpu") -> pathlib.Path:
    """The folder of a built-in base model; made by supervised training on first use, then kept in `cache_dir`."""
    key = hashlib.sha256(json.dumps(BUILT_IN[name], sort_keys=True).encode()).hexdigest()[:10]
    folder = pathlib.Path(cache_dir) / f"{name}-{digits}-digits-{key}"
    if not (folder / "config.json").exists():
        require(parallel.rank() == 0,
                f"there is no built-in model in {folder}; rank 0 makes it, in a --cache-dir that all machines see")
        folder.parent.mkdir(parents=True, exist_ok=True)
        model, tokenizer = make_built_in_model(digits, BUILT_IN[name], device=device)
        if not (folder / "config.json").exists():  # another process may have been quicker, with the same model
            replace_folder(folder, lambda scratch: (model.save_pretrained(scratch), tokenizer.save_pretrained(scratch)))
    return folder


def character_tokenizer():
    """One token per character of arithmetic, as an ordinary fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+-*=,; "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False, padding_side="left")


def make_built_in_model(digits: int, recipe: dict, *, device="cpu"):
    """Train a built-in model on additions of which 60 % hold one mistake, so that it knows the task but errs.

    Reinforcement learning needs a base model that is sometimes right. The mistakes set how often: sampled accuracy
    settles near the share of demonstrations without one, however long the training. Four digits are shown with worked
    steps, and the mistake is a slip in one of them; fewer digits are shown as the sum alone, with one digit replaced.
    """
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = character_tokenizer()
    shape = {k: v for k, v in recipe.items() if k in Qwen2Config().to_dict()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape))
    model.to(device)
    generator = torch.Generator().manual_seed(0)
    examples, _ = addition_examples(digits)
    prompts = [tokenizer(e.terse)["input_ids"] for e in examples]
    if digits < 4:
        shown = [[e.answer for e in examples]]
        lengths = torch.tensor([len(e.answer) for e in examples])
    else:  # without a mistake, and with a slip in each of the steps
        shown = [[worked_steps(e.terse, slip) for e in examples] for slip in (None, *range(digits))]
        lengths = torch.tensor([max(map(len, e.terse.rstrip("=").split("+"))) for e in examples])
    demonstrations = [tokenizer(texts)["input_ids"] for texts in shown]
    first_digit = tokenizer.convert_tokens_to_ids("0")
    width = max(len(p) for p in prompts) + max(map(len, sum(demonstrations, []))) + 1  # noqa: RUF017 (the end of text)
    rows = torch.full((len(shown), len(examples), width), tokenizer.pad_token_id)
    for version, answers in zip(rows, demonstrations):
        for row, prompt, answer in zip(version, prompts, answers):
            row[: len(prompt) + len(answer) + 1] = torch.tensor(prompt + answer + [tokenizer.eos_token_id])
    starts = torch.tensor([len(p) for p in prompts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], weight_decay=0.01)
    steps = recipe["steps"][digits]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe["learning_rate"], total_steps=steps)
    progress = tqdm(range(steps), desc="making the built-in model (once)", mininterval=redraw_seconds())
    for _ in progress:
        pick = torch.randint(len(examples), (recipe["batch"],), generator=generator)
        wrong = torch.rand(len(pick), generator=generator) < recipe["wrong_share"]
        place = (torch.rand(len(pick), generator=generator) * lengths[pick]).long()
        shift = torch.randint(1, 10, (len(pick),), generator=generator)
        if len(shown) > 1:
            tokens = rows[torch.where(wrong, place + 1, 0), pick]
        else:
            tokens, place = rows[0, pick].clone(), starts[pick] + place
            digit = tokens.gather(1, place[:, None]).squeeze(1) - first_digit
            tokens[wrong, place[wrong]] = first_digit + (digit + shift)[wrong] % 10
        not_learned = (torch.arange(width) < starts[pick, None]) | (tokens == tokenizer.pad_token_id)
        labels = tokens.masked_fill(not_learned, -100)
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = model(input_ids=tokens.to(device), labels=labels.to(device)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model, tokenizer


def copy_for_sampling(model, config):
    """The sampler: the policy itself where it is refreshed in every step, which saves a copy of the weights.

    It is a copy when it may be stale, when the policy is sharded, or when the engine needs bfloat16 weights.
    """
    cuda = model.device.type == "cuda"
    if not (config.sync_interval > 1 or config.offline or config.shard or (config.engine == "paged" and cuda)):
        return model
    if lora.has_adapters(model):
        return lora.copy_of_adapters(model)
    sampler = copy.deepcopy(model)
    # The weights alone: in bfloat16 the rotary frequencies, which are buffers, would be wrong at far positions.
    for weight in sampler.parameters() if cuda else ():
        weight.data = weight.data.to(autocast_dtype(config, model.device) or torch.float32)
    return sampler
