"""--dry-run and the recipes: exact counts, an estimate of memory that a measurement confirms, mistakes in one line."""

import importlib
import json
import math
import re
import types
import weakref

import pytest
import torch
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.recipes.tool_reward import exact_call, find_calls
from under_the_hood import options, plan
from under_the_hood.answers import load_reward
from under_the_hood.lora import add_adapters
from under_the_hood.models import autocast, copy_for_sampling, recompute_activations
from under_the_hood.runs import METRICS
from under_the_hood.tasks import read_jsonl

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
FOLDER = ROOT / "experiments" / "recipes"
RECIPES = sorted(FOLDER.glob("*.json"))
PUBLISHED = {  # parameters, as the model cards' safetensors count them
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008, "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768, "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304, "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688, "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512, "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664, "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352}


def parse(argv):
    return options.parse_arguments(lm.Config, lm.GROUPS, lm.__doc__, METRICS, argv)


def shape_of(**flags):
    return plan.describe(plan.find_model(lm.Config(**flags))[0])


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """Flags → what --dry-run prints, started in the repository's folder. Its exit status says whether a run fits."""
    monkeypatch.chdir(ROOT)

    def run(*flags):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            lm.main([*map(str, flags), "--dry-run"])
        text = capsys.readouterr().out
        assert stop.value.code == (3 if "The run does NOT fit" in text else 0)
        return text
    return run


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stopped:
        lm.main([str(flag) for flag in flags])
    captured = capsys.readouterr()
    message = captured.err.strip()
    assert stopped.value.code == 2 and message.startswith("error: ") and "\n" not in message and not captured.out
    return message


# ------------------------------------------------------------------------------------------------------------ counts


@pytest.mark.parametrize("name", plan.SHAPES)
def test_published_shapes_have_the_published_number_of_parameters(name):
    shape = shape_of(model=name)
    assert shape.parameters == PUBLISHED[name]
    # a tied embedding is counted once and is also a matrix; an untied one is not in matrix products
    assert shape.ends == shape.vocabulary * shape.hidden * (1 if plan.SHAPES[name][-1] else 2)
    assert shape.matrices < shape.parameters and shape.context >= 8192


def test_counts_of_a_step_and_a_run_by_hand(dry_run):
    text = dry_run("--steps", 7, "--prompts-per-step", 4, "--group-size", 3, "--max-new-tokens", 5, "--eval-every", 3)
    assert "3 layers, 390,528 parameters" in text
    # 4·(6 + 3·5); "34+57=" has 6
    assert "at most 84 tokens: 4 prompts of 6 (the longest) and 3 responses of 5" in text
    assert "7 optimizer steps, 84 rollouts; 4 evaluations of 256 questions" in text  # at steps 0, 3, 6, 7
    assert "0.0 times" in text and "The run fits" in text


def test_the_whole_step_adds_up(dry_run):
    text = dry_run("--sync-interval", 4)
    sizes = [float(number) for number in re.findall(r"^ +([\d.]+) MiB", text, re.MULTILINE)]
    phases = re.findall(r"^ {4,6}([\d.]+) MiB  (?:held|sampling|training)", text, re.MULTILINE)
    phases = [float(number) for number in phases]
    assert len(phases) == 3 and sizes[-1] == pytest.approx(phases[0] + max(phases[1:]), abs=.02)
    assert sum(sizes[:-1]) == pytest.approx(2 * sum(phases), abs=.1)  # every part, and their sums


def test_a_second_copy_of_the_weights_only_where_the_run_makes_one(dry_run):
    for flags, own in (((), False), (("--sync-offset", 3), False), (("--sync-interval", 2), True),
                       (("--offline",), True)):
        assert ("the sampler's own weights" in dry_run(*flags)) == own, flags
    held = plan.memory(lm.Config(offline=True), shape_of(), plan.Setting(6))["held all the time"]
    assert list(held.values()) == [4 * 390_528, 8 * 390_528, 4 * 390_528]
    assert "the sampler's own weights, bfloat16" in dry_run("--offline", "--device-memory", 80)


def test_the_disk_holds_weights_two_moments_and_a_sampler_of_its_own(dry_run):
    alone, beside = dry_run("--sync-interval", 1), dry_run("--offline")
    assert "disk      4.47 MiB for a checkpoint" in alone and "disk      5.96 MiB" in beside  # 3 and 4 times 4·390,528
    assert "devices" not in alone


def test_no_weights_are_loaded_and_nothing_is_written(tiny_run, tmp_path, monkeypatch, capsys):
    from transformers import PreTrainedModel
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        lm.main([*tiny_run[2], "--dry-run"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "18 questions to train on, 2 held out" in text and "from its config" in text
    expected = sum(p.numel() for p in lm_model(tiny_run[0]))
    assert f"{expected:,} parameters" in text and not list(tmp_path.iterdir())


def lm_model(folder):
    from safetensors.torch import load_file
    return load_file(folder / "model.safetensors").values()


def test_only_the_first_process_speaks(dry_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert "on each of 4 devices" in dry_run()
    monkeypatch.setenv("RANK", "1")
    assert dry_run() == ""


# ------------------------------------------------------------------------------------------------------------ memory


class PeakMemory(TorchDispatchMode):
    """Adds up the storages that are alive, from those of `held` on, and remembers the most.

    It sees every operation of PyTorch, forwards and backwards, and knows nothing of models.
    """

    def __init__(self, held):
        super().__init__()
        self.alive, self.now, self.most = set(), 0, 0
        for tensor in held:
            self.watch(tensor)

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, count):
        self.alive.discard(key)
        self.now -= count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        return result


def measured_peak(config, prompt_tokens, model_config):
    """Bytes at the peak of the second step, and which phase it is in. All responses have their full length."""
    from transformers import AutoModelForCausalLM
    model, row = AutoModelForCausalLM.from_config(model_config).eval(), lm.chosen_algorithm(config)
    if config.lora_rank:
        add_adapters(model, rank=config.lora_rank)
    if config.gradient_checkpointing:
        recompute_activations(model)
    sampler = copy_for_sampling(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 13, (config.prompts_per_step, prompt_tokens), generator=generator)
    prompt_mask = torch.arange(prompt_tokens) >= torch.arange(len(prompt))[:, None] % 2  # every second one has padding
    rewards = (torch.arange(config.group_size) % 2).float().repeat(len(prompt), 1)

    def step(memory=None):
        with autocast(config, prompt.device):
            tokens, mask, logprobs = lm.ENGINES[config.engine][0](
                sampler, prompt, prompt_mask, group_size=config.group_size, max_new_tokens=config.max_new_tokens,
                temperature=1.0, eos_ids={10**6}, pad_id=0, generator=generator)
        assert mask.all() and mask.shape[1] == config.max_new_tokens
        sampling = memory.most if memory else 0
        batch = lm.Rollout(prompt, prompt_mask, tokens, mask, logprobs, rewards, ~mask[:, 0], 0, [])
        lm.train_step(model, optimizer, batch, config, algorithm=row, generator=generator)
        return sampling

    step()  # the moments and gradients exist from here on
    state = [value for values in optimizer.state.values() for value in values.values()]
    held = [*model.parameters(), *sampler.parameters(), *state, *(p.grad for p in trained)]
    with PeakMemory(held) as memory:
        sampling = step(memory)
    return memory.most, "sampling" if sampling == memory.most else "training"


SHORT = {"prompts_per_step": 4, "max_new_tokens": 32}  # 4 groups of 20 + 8·32 tokens
WAYS = {  # name → what peaks, flags, tokens of a prompt
    "tiny": ("training", {"model": "tiny", "prompts_per_step": 16, "max_new_tokens": 16, "sync_interval": 4}, 12),
    "tiny, passes": ("training", {"model": "tiny", "prompts_per_step": 8, "max_new_tokens": 32,
                                  "micro_batch_tokens": 600, "dtype": "bfloat16"}, 20),
    "tiny, checkpoints": ("training", {"model": "tiny", "prompts_per_step": 8, "max_new_tokens": 32,
                                       "micro_batch_tokens": 900, "gradient_checkpointing": True}, 20),
    "tiny, sampling": ("sampling", {"model": "tiny", "prompts_per_step": 16, "max_new_tokens": 48,
                                    "micro_batch_tokens": 1, "offline": True}, 8),
    "one pass": ("training", {**SHORT}, 20),
    "long responses": ("training", {"prompts_per_step": 2, "max_new_tokens": 80}, 60),
    "bfloat16": ("training", {**SHORT, "dtype": "bfloat16"}, 20),
    "checkpoints": ("training", {**SHORT, "gradient_checkpointing": True}, 20),
    "bfloat16, checkpoints": ("training", {**SHORT, "gradient_checkpointing": True, "dtype": "bfloat16"}, 20),
    "plain": ("training", {**SHORT, "engine": "plain"}, 20),
    "plain, sampling": ("sampling", {**SHORT, "engine": "plain", "micro_batch_tokens": 1, "prompts_per_step": 16,
                                     "max_new_tokens": 4}, 40),
    "bfloat16, plain": ("training", {**SHORT, "engine": "plain", "dtype": "bfloat16"}, 20),
    "uncached": ("sampling", {**SHORT, "engine": "uncached", "micro_batch_tokens": 1, "prompts_per_step": 16,
                              "max_new_tokens": 8}, 20),
    "adapters": ("training", {**SHORT, "lora_rank": 8}, 20),
    "adapters, stale": ("training", {**SHORT, "lora_rank": 8, "sync_interval": 4, "micro_batch_tokens": 300}, 20),
    "bfloat16, adapters": ("training", {**SHORT, "lora_rank": 8, "dtype": "bfloat16", "micro_batch_tokens": 300}, 20),
    "adapters, checkpoints": ("training", {**SHORT, "lora_rank": 8, "gradient_checkpointing": True,
                                           "micro_batch_tokens": 450}, 20),
    "bfloat16, adapters, checkpoints": ("training", {**SHORT, "lora_rank": 8, "gradient_checkpointing": True,
                                                     "dtype": "bfloat16"}, 20),
}


QUICK = ("tiny", "tiny, passes", "one pass", "plain", "bfloat16, adapters")  # the others take seconds each


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_the_estimate_is_within_15_percent_of_the_tensors_of_a_step(way):
    from transformers import Qwen2Config
    dominant, flags, prompt_tokens = WAYS[way]
    config = lm.Config(device="cpu", eval_questions=1, eval_samples=1, **{"engine": "fast", **flags})
    model_config = Qwen2Config(vocab_size=2000, hidden_size=256, intermediate_size=700, num_hidden_layers=4,
                               num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    if "model" in flags:
        model_config = plan.find_model(config)[0]
    width = 2 if config.dtype == "bfloat16" else 4
    parts = plan.memory(config, plan.describe(model_config), plan.Setting(prompt_tokens, width=width))
    _, sampling, training = (sum(part.values()) for part in parts.values())
    measured, phase = measured_peak(config, prompt_tokens, model_config)
    assert phase == dominant == ("sampling" if sampling > training else "training")
    assert plan.peak(parts) == pytest.approx(measured, rel=.15), f"{plan.peak(parts) / measured:.3f} of the measured"


# Small numbers, each another one, for arithmetic by hand.
BY_HAND = types.SimpleNamespace(parameters=1000, ends=200, matrices=600, adapter_sides=50, layers=2, hidden=8, heads=2,
                                vocabulary=20, intermediate=16, queries=8, keys=4, gated=True)


def by_hand(setting=None, shape=BY_HAND, **flags):
    """Bytes of every part for 3 prompts of 7 tokens with 2 responses of 5, and 4 questions in an evaluation."""
    config = lm.Config(**{"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 5, "eval_questions": 4,
                          "eval_samples": 1, "sync_interval": 1, "micro_batch_tokens": 34} | flags)
    return [[*part.values()] for part in plan.memory(config, shape, plan.Setting(7, **(setting or {}))).values()]


def test_every_part_by_hand_in_float32():
    """A group takes 7 + 2·5 = 17 of the 34 tokens: 2 groups a pass, 4 responses, whose last token predicts nothing.

    A row of 2·(7 + 2·4) = 30 tokens, its keys, and 30² pairs. A layer keeps of each token 2·2·4·8 (norms) + 2·4·8
    (their output) + 2·4·8 + 4·2 (attention) + 4·4·16 (MLP) = 520 bytes, of each key 2·4·8 = 64, of each pair 4:
    30·584 + 900·4 = 21120. Around the head: (3·30 + 4·5) states of 4·8 bytes = 3520.
    """
    held, sampling, training = by_hand()
    assert held == [4000, 8000]
    # gradients of the step before; 6 rows of 12 positions, keys of 4 numbers: 288; in 2 layers, keys and values of 4
    # bytes each; 4 times 6·20 floats
    assert sampling == [4000, 2 * 288 * 8, 288 * 4, 4 * 6 * 20 * 4]
    # the head: 3 times 4·5·20 floats, and its own 20·8, 5440, is less than a layer's backward, 3·30·4·16 = 5760, and
    # less than the table of who sees whom, 8·900
    assert training == [4000, 2 * 21120 + 3520, 7200]
    assert by_hand(micro_batch_tokens=33)[2] == by_hand(micro_batch_tokens=1)[2]  # one group
    assert by_hand(micro_batch_tokens=50)[2] == training and by_hand(micro_batch_tokens=51)[2][1] > training[1]
    assert by_hand(eval_questions=8)[1][1] == 2 * (8 * 12 * 4) * 8  # 8 rows of an evaluation
    assert by_hand(eval_questions=500)[1][1] == by_hand(eval_questions=64)[1][1] == 2 * (64 * 12 * 4) * 8


def test_a_single_pass_has_no_gradients_where_it_keeps_most():
    """All 3 groups in one pass: 2 rows of 30, 60 tokens and keys, 1800 pairs, a layer 60·584 + 1800·4 = 42240, around
    the head (3·60 + 6·5)·32 = 6720. Its peak is its beginning, without gradients; with few layers' worth of activations
    beside many parameters it is its end, with all gradients and one layer.
    """
    assert by_hand(micro_batch_tokens=51)[2] == [0, 2 * 42240 + 6720, 8 * 1800]
    large = types.SimpleNamespace(**{**vars(BY_HAND), "parameters": 10**6})
    assert by_hand(shape=large, micro_batch_tokens=51)[2] == [4 * 10**6, (2 * 42240 + 6720) // 2, 3 * 60 * 4 * 16]
    assert by_hand(shape=large)[2][0] == 4 * 10**6  # of two passes the second finds the gradients of the first


def test_tokens_keys_and_pairs_of_the_three_ways():
    """3 groups of 2 responses of 5 tokens to 7: each with its prompt; packed; and long ones, of 300 tokens, shared."""
    assert plan.positions(7, 5, 2, 3, again=True) == (6 * 12, 6 * 12, 6 * 12 * 12, 0)
    assert plan.positions(7, 5, 2, 3, again=False) == (2 * 30, 2 * 30, 2 * 30 * 30, 8 * 2 * 30 * 30)
    assert plan.positions(7, 5, 2, 1, again=False)[:3] == (15, 15, 15 * 15)
    assert plan.positions(7, 300, 2, 3, again=False) == (
        3 * 7 + 6 * 299, 3 * 7 + 6 * 306, 3 * 7 * 7 + 6 * 299 * 306, 0)


def test_every_part_by_hand_in_bfloat16():
    """Autocast keeps a copy of the matrices, 600·2, while it trains, and only casts while it samples: 20·8·2 for the
    head. RoPE leaves keys in float32, values take 2 bytes.
    """
    held, sampling, training = by_hand({"width": 2})
    assert held == [4000, 8000] and sampling == [4000, 2 * 288 * (4 + 2), 288 * 4, 320, 1920]
    # a token 128 + 5·2·8 + 2·2·8 + 4·2 + 4·2·16 = 376, a key 2·2·8 = 32, a pair 2; logits take 3·4 + 2 bytes
    assert training == [4000, 1200, 2 * (30 * 408 + 900 * 2) + 3520, 7200]
    wide = types.SimpleNamespace(**{**vars(BY_HAND), "vocabulary": 40})
    assert by_hand({"width": 2}, shape=wide)[2][-1] == 4 * 5 * 40 * 14 + 40 * 8 * 4


def test_every_part_by_hand_of_paged_sampling_with_checkpoints_on_a_gpu():
    """Each response runs with its prompt: 2·7 + 2·5 = 24 tokens a group, so one group; 24 tokens and keys, 2·12²
    pairs. Of a layer only its input stays, 24·4·8 in each; the layer itself, 24·376 + 24·32 + 288·2 = 10368, comes and
    goes, with 3·24·2·16 = 2304. The pages take half of what is left: (20000 − 18000)/2 < 2·288·4.
    """
    gpu = {"width": 2, "cuda": True}
    flags = {"engine": "paged", "gradient_checkpointing": True, "offline": True}
    held, sampling, training = by_hand(gpu | {"available": 20_000}, **flags)
    assert held == [4000, 8000, 2000] and sampling == [4000, 1000, 288 * 2, 1920]
    assert training == [4000, 2 * 24 * 32 + (3 * 24 + 2 * 5) * 32, 10368 + 2304]
    assert by_hand(gpu, **flags)[1][1] == 2 * 288 * 4
    assert by_hand(gpu | {"available": 10_000}, **flags)[1][1] == 0
    words = [key for part in plan.memory(lm.Config(engine="paged"), BY_HAND, plan.Setting(7)).values() for key in part]
    assert "keys and values, in pages" in words


def test_every_part_by_hand_of_shards():
    """2 devices: 2 prompts each, and half of what is held but for the sampler; 24 tokens a group, 2 groups in 48.

    4·12 tokens and keys, 4·12² pairs: a layer 48·520 + 48·64 + 576·4 = 30336. Gathered: the ends and 2 of 2 layers.
    A single pass, so its peak has no gradients yet.
    """
    held, sampling, training, starting = by_hand({"processes": 2}, shard=True, micro_batch_tokens=48)
    assert held == [2000, 4000, 4000] and sampling[:2] == [2000, 2 * (4 * 12 * 4) * 8] and starting == [0]
    assert training == [0, (200 + 2 * 800 // 2) * 4, 2 * 30336 + (3 * 48 + 4 * 5) * 32, 3 * 48 * 4 * 16]


def test_every_part_by_hand_of_the_plain_engines():
    """06's own functions: logits of all 7 + 5 positions at once, in float32 3 arrays more of the responses' 5.

    A pass has 2 groups, as it counts a prompt once, but each response runs with its own copy. Sampling reads the
    prompt's 7 positions for each of 6 rows; uncached all 12.
    """
    _, sampling, training = by_hand(engine="plain")
    assert sampling == [4000, 2 * 288 * 8, 288 * 4, (4 * 4 + 6 * 4) * 6 * 20]
    assert training[-1] == (4 * 12 * 4 + 3 * 4 * 5 * 4) * 20 + 640
    narrow = by_hand({"width": 2}, engine="plain")
    assert narrow[1][3] == 1200 and narrow[1][-1] == (4 * 4 + 6 * 2) * 6 * 20  # without inference mode casts are kept
    assert narrow[2][-1] == (4 * 12 * 2 + 3 * 4 * 5 * 4) * 20 + 640
    without = by_hand(engine="uncached")
    assert without[1] == [4000, 6 * 12 * 4 * (2 * 16 + 3 * 8), (4 * 4 + 11 * 4) * 6 * 20] and without[2] == training


def test_every_part_by_hand_of_adapters_and_of_gpt2():
    """Adapters of rank 2 are 100 numbers, and the sampler has its own. Of a token a layer keeps no x/rms, 2·4·8 bytes
    less, and the inner sides of seven adapters, 7·4·2 more; in bfloat16 7·2·2, and one more cast of 2·8.
    """
    held, sampling, training = by_hand(lora_rank=2, sync_interval=2)
    assert held == [4400, 800, 400] and sampling[0] == training[0] == 400
    assert training[1:] == [2 * (21120 + 30 * (56 - 64)) + 3520, 7200]
    # frozen weights are cast anew in each use, but for the backward pass; the head has no gradient of its own
    narrow = by_hand({"width": 2}, lora_rank=2)
    assert narrow[1][3] == 320 and narrow[2][1] == 1200
    assert narrow[2][2:] == [2 * (30 * (408 - 64 + 28 + 16) + 900 * 2) + 3520, 7200]
    wide = types.SimpleNamespace(**{**vars(BY_HAND), "vocabulary": 40})
    assert by_hand({"width": 2}, shape=wide, lora_rank=2)[2][-1] == 4 * 5 * 40 * 14
    assert by_hand({"width": 2}, lora_rank=2, engine="plain")[1][3] == 320
    gpt2 = types.SimpleNamespace(**{**vars(BY_HAND), "gated": False})
    # a token 2·4·8 + 2·4·8 + 72 + 5·4·16 = 520; here keys are as wide as the rest in bfloat16
    assert by_hand(shape=gpt2)[2][1] == 2 * 21120 + 3520
    assert by_hand({"width": 2}, shape=gpt2)[1][1] == 2 * 288 * 4


def test_autograd_keeps_what_the_formula_says():
    """One Qwen2 layer with grouped queries, byte for byte but the few of the norms' scales and of RoPE."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    config = Qwen2Config(vocab_size=50, hidden_size=64, intermediate_size=200, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    model, shape = Qwen2ForCausalLM(config).eval(), plan.describe(config)
    ids, own = torch.randint(1, 50, (3, 40)), {p.untyped_storage().data_ptr() for p in model.parameters()}
    mask = torch.ones_like(ids)
    mask[0, 0] = 0  # with padding attention needs a mask, and cannot share keys among query heads
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=width < 4):
            output = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # autocast's copies of weights are no activations
        weights = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
        total = sum(t.untyped_storage().nbytes() for pointer, t in kept.items()
                    if pointer not in own and t.shape not in weights)
        expected = plan.saved_by_layer(shape, tokens=120, keys=120, pairs=3 * 40 * 40, width=width)
        expected += 120 * 64 * 8  # the last norm
        assert output.requires_grad and total == pytest.approx(expected, rel=.05)


def test_what_does_not_fit_comes_with_flags_that_help(dry_run):
    flags = ("--model", "Qwen/Qwen2.5-0.5B-Instruct", "--prompts-per-step", 8, "--max-new-tokens", 512,
             "--group-size", 4)
    text = dry_run(*flags, "--device-memory", 20)
    assert "does NOT fit" in text and "too large training" in text
    offered = re.findall(r"and fit, with (--micro-batch-tokens) (\d+)$", text, re.MULTILINE)
    assert len(offered) == 1 and "--gradient-checkpointing" in text and "--shard, devices:" in text
    # the advice is good, and not too strong
    assert "The run fits" in dry_run(*flags, "--device-memory", 20, *offered[0])
    assert "does NOT fit" in dry_run(*flags, "--device-memory", 20, offered[0][0], int(offered[0][1]) * 2)
    assert "prompts-per-step" in dry_run(*flags, "--device-memory", 20, "--prompts-per-step", 512)
    assert "too large held (" in dry_run(*flags, "--device-memory", 2)


def advice(text):
    """[flags] that a plan offers."""
    return re.findall(r"(?:and fit|too much still), with (.*)$", text, re.MULTILINE)


def test_nothing_is_offered_that_is_set_already(dry_run):
    """Flags that are set are left out of the advice, alone and in combination."""
    flags = ["--model", "Qwen/Qwen2.5-7B-Instruct", "--prompts-per-step", 8, "--max-new-tokens", 512,
             "--device-memory", 40]
    together = "--micro-batch-tokens 4608 --gradient-checkpointing --eval-samples 1"
    offered = advice(dry_run(*flags))
    assert together in offered and any(line.startswith(f"{together} --shard, devices: ") for line in offered)
    saving = {"--gradient-checkpointing": [], "--eval-samples": [1], "--micro-batch-tokens": [4608],
              "--engine": ["paged"]}
    for name, value in saving.items():
        offered = advice(dry_run(*flags, name, *value))
        assert offered and not any(name in line for line in offered), (name, offered)
        assert len(offered) == len(set(offered))
    everything = [word for name, value in saving.items() for word in (name, *value)]
    assert advice(dry_run(*flags, *everything)) == ["--shard, devices: 4"]


def test_a_sharded_run_is_told_to_take_more_devices(dry_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = dry_run("--model", "Qwen/Qwen2.5-7B-Instruct", "--max-new-tokens", 512, "--device-memory", 40, "--shard")
    more = [line for line in advice(text) if "more devices: " in line]
    assert more and "--shard" not in text and all(int(line.split()[-1]) > 2 for line in more)


@pytest.mark.parametrize("flags", [("--algorithm", "aepo"), ("--algorithm", "grpo", "--entropy-target", 0.5),
                                   ("--lora-rank", 8)])
def test_shards_are_not_offered_to_a_run_that_cannot_have_them(dry_run, flags):
    text = dry_run("--model", "Qwen/Qwen2.5-7B-Instruct", "--max-new-tokens", 512, "--device-memory", 30, *flags)
    assert "does NOT fit" in text and "shard" not in text


def test_memory_follows_the_flags():
    def total(phase, setting=None, **flags):
        setting = plan.Setting(100, width=2, cuda=True, **(setting or {}))
        return sum([*plan.memory(lm.Config(max_new_tokens=100, **flags), shape, setting).values()][phase].values())
    shape = shape_of(model="Qwen/Qwen2.5-0.5B-Instruct")
    gradients = 4 * 494_032_768
    assert total(1, prompts_per_step=64) - gradients > 1.9 * (total(1, prompts_per_step=32) - gradients)
    assert total(2, micro_batch_tokens=1800) < .5 * total(2, micro_batch_tokens=7200)
    assert total(2, gradient_checkpointing=True) < .3 * total(2)
    own = 2 * 494_032_768  # beside a sharded policy the sampler is whole; the run starts with two whole float32 models
    assert total(0, {"processes": 64}, shard=True) + total(3, {"processes": 64}, shard=True) == 8 * 494_032_768
    assert total(0, {"processes": 4}, shard=True) - own == pytest.approx((total(0) - own) / 4)
    assert total(1, {"processes": 4}, eval_samples=1) - gradients < .3 * (total(1, eval_samples=1) - gradients)
    # AEPO runs its second batch in one pass, with the gradients of the first one there
    one_pass = plan.peak(plan.memory(lm.Config(micro_batch_tokens=100), shape, plan.Setting(100), whole_batch=True))
    whole = plan.peak(plan.memory(lm.Config(micro_batch_tokens=10**6), shape, plan.Setting(100)))
    assert one_pass == whole + gradients


def test_gpt2_has_a_plan_as_well(dry_run, tmp_path):
    from conftest import build_model
    build_model("gpt2", vocab_size=20).save_pretrained(tmp_path / "gpt2")
    text = dry_run("--model", tmp_path / "gpt2")
    assert "2 layers" in text and "prompts of 120 (the limit)" in text  # no tokenizer there; context 128 − 8
    shape = shape_of(model=str(tmp_path / "gpt2"))
    assert (shape.hidden, shape.intermediate, shape.queries, shape.keys, shape.gated) == (32, 4 * 32, 32, 32, False)


# ----------------------------------------------------------------------------------------------------------- recipes


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n' * 3)
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(dry_run, gsm8k, path):
    stored = json.loads(path.read_text(encoding="utf-8"))
    text = dry_run("--config", path, "--device-memory", 80)
    assert f"{PUBLISHED[stored['model']]:,} parameters" in text
    rollouts = stored["steps"] * stored["prompts_per_step"] * stored["group_size"]
    assert f"{stored['steps']:,} optimizer steps, {rollouts:,} rollouts" in text
    assert "bfloat16 compute" in text and "the sampler's own weights" in text
    missing = stored["task"].startswith("data/") and not (ROOT / stored["task"]).exists()
    words = f'{stored["task"]} is missing; make it with one {{"question": "…", "answer": "…"}} a line'
    assert (words in text) == missing
    fits = "and fit, with" in text or "The run fits" in text
    assert fits and ("The run fits" in text) == (path.stem == "gsm8k")  # as recipes/README.md says


def test_recipes_hold_the_papers_numbers():
    recipe = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RECIPES}
    assert recipe.keys() == {"gsm8k", "math", "guru_math", "tool_calls"}
    paper = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "task": "gsm8k", "prompts_per_step": 96, "group_size": 8,
             "steps": 160, "learning_rate": 1e-6, "temperature": 1.0, "max_new_tokens": 1024, "max_grad_norm": 1.0,
             "sync_interval": 20}
    assert paper.items() <= recipe["gsm8k"].items()
    paper = {"prompts_per_step": 16, "group_size": 8, "learning_rate": 6e-8, "max_new_tokens": 2048, "steps": 2000,
             "model": "meta-llama/Llama-3.1-8B-Instruct"}
    assert paper.items() <= recipe["math"].items()
    assert recipe["guru_math"]["model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert recipe["tool_calls"]["model"] == "meta-llama/Llama-3.2-3B-Instruct"


def test_every_command_of_their_readme_is_accepted_and_every_recipe_is_in_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"06_full_llm_training\.py (--[^`#\n]+)", text)
    assert len(commands) == 7 and all(f"[{path.name}]({path.name})" in text for path in RECIPES)
    for command in commands:
        config = parse(command.split())
        monkeypatch.setenv("WORLD_SIZE", "4" if config.shard else "1")
        monkeypatch.setenv("RANK", "0")
        options.validate(config, lm.ALGORITHMS, lm.try_loss)


def test_a_real_run_without_its_data_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, "--config", FOLDER / "math.json", "--out", tmp_path / "run")
    assert "data/math_train.jsonl" in message and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("text, expected", [
    ('{"device_memory": -1}', "--device-memory is -1"),
    ('{"algorithm": "ppo"}', "unknown algorithm 'ppo'"),
    ('{"model": "no/such-model"}', "no/such-model"),
    ('{"model": "nothing.gguf"}', "nothing.gguf: no such file"),
    ('{"task": "subtraction"}', "subtraction"),
    ('{"max_new_tokens": 64}', "leaves no room"),
    ('{"reward": "experiments.recipes.tool_reward:no_such"}', "no_such"),
])
def test_a_bad_recipe_is_one_line(capsys, tmp_path, text, expected):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    assert expected in refused(capsys, "--config", path, "--dry-run")


def test_prompts_are_counted_as_the_run_will_write_them(tmp_path, dry_run, capsys):
    """Ids by hand: the question's 2 letters between <|user|> and </s>, then <|assistant|>, 5; a system message of 3
    letters adds them, </s>, and the letters of <|system|>, which is no token here; a switch, one more <|assistant|>.
    """
    from conftest import bpe_tokenizer, saved
    tokenizer = bpe_tokenizer(chat=True)
    tokenizer.chat_template += "{% if twice %}<|assistant|>{% endif %}"
    model = saved(tmp_path / "model", "qwen2", tokenizer)
    lines = (f'{{"question": "Z{letter}", "answer": "1"}}\n' for letter in "ABCDEFGH")
    (tmp_path / "task.jsonl").write_text("".join(lines), encoding="utf-8")
    spelled = len(tokenizer("<|system|>")["input_ids"])
    flags = ("--model", model, "--task", tmp_path / "task.jsonl", "--max-new-tokens", 4, "--eval-questions", 2)
    for more, count in (((), 5), (("--chat-template-kwargs", '{"twice": true}'), 6),
                        (("--system-prompt", "XYZ"), 9 + spelled),
                        (("--system-prompt", "XYZ", "--chat-template-kwargs", '{"twice": true}'), 10 + spelled)):
        assert f"prompts of {count} (the longest)" in dry_run(*flags, *more), more
    assert "JSON object" in refused(capsys, *flags, "--chat-template-kwargs", "twice", "--dry-run")
    assert "no chat template" in refused(capsys, "--system-prompt", "XYZ", "--dry-run")  # as the run itself


def test_the_context_ends_where_a_longrope_model_changes_its_frequencies(tmp_path, dry_run):
    from transformers import Phi3Config
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64}
    Phi3Config(**small, max_position_embeddings=4096, original_max_position_embeddings=64,
               rope_parameters=rope).save_pretrained(tmp_path / "long")
    text = dry_run("--model", tmp_path / "long", "--max-new-tokens", 24)
    assert "prompts of 40 (the limit)" in text  # 64 − 24, though the positions go on to 4096


def test_a_malformed_data_file_is_refused_though_a_missing_one_is_not(capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1"}\n', encoding="utf-8")
    assert "bad.jsonl line 1" in refused(capsys, "--task", tmp_path / "bad.jsonl", "--dry-run")


def test_a_model_that_is_no_decoder_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    assert "no ordinary decoder" in refused(capsys, "--model", tmp_path, "--dry-run")


# -------------------------------------------------------------------------------------------------------- tool calls


CALL = '{"name": "add", "arguments": {"a": 1, "b": {"c": [true, "x"]}}}'


@pytest.mark.parametrize("response, reward", [
    (CALL, 1),
    ('{"arguments": {"b": {"c": [true,"x"]}, "a": 1},\n "name": "add"}', 1),  # order and white space
    ('{"name": "add", "parameters": {"a": 1, "b": {"c": [true, "x"]}}}', 1),  # Llama's word for them
    (f"Sure, {{here}} it is:\n```json\n{CALL}\n```", 1),
    (CALL.replace("add", "sub"), 0),
    (CALL.replace("1", "2"), 0),
    (CALL.replace("1", '"1"'), 0),
    (CALL.replace("1", "true"), 0),   # True == 1 in Python, not in JSON
    (CALL.replace("true", "1"), 0),
    (CALL.replace('"a": 1, ', ""), 0),
    (CALL.replace('"a": 1', '"a": 1, "z": 0'), 0),
    (CALL + CALL, 0),                 # two guesses are not one answer
    (CALL[:-1], 0),                   # cut off
    ('{"name": "add"}', 0), ('{"name": 3, "arguments": {}}', 0), ("", 0), ("{" * 20_000, 0), ("[" * 9_000 + CALL, 1),
    ('{"a":' * 3_000, 0), ("9" * 5_000, 0), ('{"name": ' + "9" * 5_000 + "}", 0),
])
def test_the_reward_is_an_exact_match_of_name_and_arguments(response, reward):
    assert exact_call("add them", response, CALL) == reward


def test_an_answer_without_a_call_is_the_datas_fault():
    with pytest.raises(ValueError, match="holds no call"):
        exact_call("?", CALL, "42")


def test_the_example_data_rewards_its_own_answers_only(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse(["--config", "experiments/recipes/tool_calls.json"])
    examples, reward = read_jsonl(config.task), load_reward(config.reward)
    for asked in examples:
        called = json.loads(asked.answer)
        assert find_calls(asked.answer) and f'"name": "{called["name"]}"' in asked.question
        for other in examples:
            assert reward(asked.question, other.answer, asked.answer) == (other is asked)
    assert math.isfinite(config.learning_rate) and len({e.question for e in examples}) == len(examples) >= 8
