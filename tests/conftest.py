"""Make the lessons importable: their names start with a digit, so tests call importlib.import_module("01_reinforce").

The tests of a room of under_the_hood/ are in the folder of the same name here; they too say `from conftest import …`.
What they find here are small real models and tokenizers, made in a moment from a fixed seed.
"""

import os
import pathlib
import signal
import socket
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network; below, none may try
TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(TESTS)]  # the product first; then conftest, for the tests in folders below this one


HERE = socket.gethostname()


def stay_at_home(event, arguments):
    """Fail whoever looks up or calls a host that is not this machine; processes and notebooks talk through localhost."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else "localhost"  # a path: a socket in the file system
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "0.0.0.0", "::", "::1", HERE) and not host.startswith("127."):
        pytest.fail(f"a test calls {host}: tests need no network")


sys.addaudithook(stay_at_home)  # which no code can take away again, and no `except Exception` hides


# A shell ignores SIGINT for what it starts in the background, and the trainer leaves an ignored signal ignored, as
# nohup wants. The tests of interruption are about a run in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def build_model(kind: str, *, vocab_size: int, seed: int = 0, **options):
    """A random causal LM of 2 layers and width 32, in eval mode: kind ∈ gpt2, llama, qwen2.

    Weight matrices are larger than usual, so that context, position and padding visibly matter to the output.
    """
    import torch
    from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config,
                              Qwen2ForCausalLM)

    options = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": vocab_size} | options
    rotary = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.15,
                                               **options))
        elif kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**(rotary | options)))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **(rotary | options)))
    return model.eval()


def build_digit_tokenizer():
    """A character tokenizer that knows 0, 1, + and =: a random model then answers "1" often enough to be rewarded."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", "0", "1", "+", "="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_bigram(logits):
    """A Llama with one layer that adds nothing: its next-token logits are row `token` of the (V, V) table."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(logits)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, hidden_size=size, intermediate_size=4, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1, head_dim=4, rms_norm_eps=1e-12,
                                         bos_token_id=None, eos_token_id=None, pad_token_id=None,
                                         tie_word_embeddings=False))
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        # The norm has scaled e_token to √V · e_token.
        model.lm_head.weight.copy_(torch.as_tensor(logits).T / size**0.5)
    return model.eval()


def left_padded(prompts, extra=0):
    """Lists of ids → (ids, mask), left-padded with 0; `extra` pads more than the batch needs."""
    import torch

    width = max(map(len, prompts)) + extra
    return (torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts]))


def right_padded(responses, extra=0, pad=0):
    """Lists of ids → (ids, mask), right-padded."""
    import torch

    width = max(map(len, responses)) + extra
    return (torch.tensor([r + [pad] * (width - len(r)) for r in responses]),
            torch.tensor([[True] * len(r) + [False] * (width - len(r)) for r in responses]))


# Texts that the BPE below is trained on.
LINES = ["What is 2 + 3? Reply with the number only.", "Question: how much is 12 + 34?",
         "Answer: 46, since 12 + 34 = 46.", "user assistant system", "Über naïve café — 1,234.50 €",
         "hello hello hello world"]
# A tokenizer puts <s> in front (bos), closes a text with </s> (close), and has a chat template that itself writes the
# BOS, where there is one; its pad token is its own, its EOS, or missing.
TOKENIZERS = {"plain": {}, "bos": {"bos": True}, "chat": {"chat": True}, "chat-bos": {"chat": True, "bos": True},
              "bos-pad-is-eos": {"bos": True, "pad": "eos"}, "no-pad": {"pad": "missing"},
              "chat-bos-no-pad": {"chat": True, "bos": True, "pad": "missing"}, "bos-eos": {"bos": True, "close": True}}


def bpe_tokenizer(*, bos=False, eos=True, chat=False, pad="own", close=False):
    """A byte-level BPE trained on LINES: <s> is 0, </s> 1, <pad> 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    if bos or close:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> " * bos + "$A" + " </s>" * close, special_tokens=[("<s>", 0), ("</s>", 1)])
    names = ({"bos_token": "<s>"} if bos else {}) | ({"eos_token": "</s>"} if eos else {})
    names |= {"own": {"pad_token": "<pad>"}, "eos": {"pad_token": "</s>"}, "missing": {}}[pad]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if chat:
        wrapped.chat_template = ("{{ bos_token }}" if bos else "") + (
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return wrapped


def saved(folder, kind, tokenizer, **options):
    """A model folder with that tokenizer, as a user would have it. GPT-2 keeps its dropout of .1."""
    model = build_model(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """(kind, name of TOKENIZERS) → (model, tokenizer) as load_model returns them, made once: leave them as they are."""
    from under_the_hood.models import load_model

    cache = {}

    def get(kind, name):
        if (kind, name) not in cache:
            folder = saved(tmp_path_factory.mktemp("model"), kind, bpe_tokenizer(**TOKENIZERS[name]))
            cache[kind, name] = load_model(str(folder), device="cpu")
        return cache[kind, name]
    return get


@pytest.fixture(scope="module")
def quick():
    """Without what takes longer than a tiny run: pictures, and waiting for the disk. Both have tests of their own."""
    from under_the_hood import comparison, pictures, runs

    with pytest.MonkeyPatch.context() as patch:
        for room in (comparison, pictures, runs):
            for name in {"plot_run", "plot_comparison", "flush_to_disk"} & vars(room).keys():
                patch.setattr(room, name, lambda *_, **__: None)
        yield


@pytest.fixture
def bigram():
    """{(token, next): log-probability} → a model with exactly these; what is left is spread over the other tokens."""
    def build(logprobs, vocab_size=10):
        import torch

        table = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
        for token in range(vocab_size):
            given = {b: p for (a, b), p in logprobs.items() if a == token}
            left = 1 - torch.tensor(list(given.values()), dtype=torch.float64).exp().sum()
            table[token] = (left.clamp(min=1e-12) / max(1, vocab_size - len(given))).log()
            for b, p in given.items():
                table[token, b] = p
        return build_bigram(table)
    return build


@pytest.fixture
def fixed_logits():
    """[l₀, l₁, …] → a model with these next-token logits after every token."""
    def build(logits):
        return build_bigram([list(logits)] * len(logits))
    return build


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """(model folder, jsonl task, flags) of the smallest run that has something to learn: seconds, not minutes.

    flags is a list for main(): a random Qwen2 with tied weights, 20 questions whose answer is "1", 4 prompts × 4
    responses.
    """
    import json

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_digit_tokenizer()
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    task = folder / "ones.jsonl"
    lines = (json.dumps({"question": f"{i:b}", "answer": "1"}) + "\n" for i in range(20))
    task.write_text("".join(lines), encoding="utf-8")
    flags = ["--model", str(folder / "model"), "--task", str(task), "--prompts-per-step", "4", "--group-size", "4",
             "--max-new-tokens", "2", "--eval-questions", "2", "--eval-samples", "2", "--learning-rate", "0.01"]
    return folder / "model", task, flags
