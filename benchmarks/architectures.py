"""Which architectures train: tiny random models of every family,
        sampler and trainer against transformers' own forward pass.

    python benchmarks/architectures.py                   about 2 minutes; writes docs/architectures.md
    python benchmarks/architectures.py Llama "Mamba 2"   only these, on the terminal
"""

import argparse
import contextlib
import importlib
import io
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lm = importlib.import_module("06_full_llm_training")  # before torch: it says how waiting threads wait

import torch
import transformers

from under_the_hood import engines, models
from under_the_hood.errors import UserError
from under_the_hood.models import character_tokenizer
from under_the_hood.runs import write_text
from under_the_hood.tasks import Example, Task

VOCABULARY, TEMPERATURE = 60, 0.8
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.15, bos_token_id=None,
             eos_token_id=None,
             pad_token_id=None)
OLD = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.15)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)

# name → (config class without "Config", what differs from SMALL; None takes a key out)
FAMILIES = {
    "Llama": ("Llama", {}),
    "Mistral, sliding window": ("Mistral", {"sliding_window": 6}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 3": ("Qwen3", {"head_dim": 8}),
    "SmolLM 3": ("SmolLM3", {}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", {}),
    "Phi-3": ("Phi3", {}),
    "Phi": ("Phi", {}),
    "Gemma": ("Gemma", {"head_dim": 8}),
        "Gemma 2, soft caps": ("Gemma2", {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 3.0}),
    "Granite": ("Granite", {"logits_scaling": 3.0}),
    "Granite MoE": ("GraniteMoe", {"logits_scaling": 3.0, **EXPERTS}),
    "Cohere": ("Cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 6}),
    "GLM-4": ("Glm4", {"head_dim": 8}),
    "Helium": ("Helium", {"head_dim": 8}),
    "StableLM": ("StableLm", {}),
    "StarCoder 2": ("Starcoder2", {}),
    "Nemotron": ("Nemotron", {}),
    "EXAONE 4": ("Exaone4", {"sliding_window": 6}),
    "ERNIE 4.5": ("Ernie4_5", {}),
    "Apertus": ("Apertus", {}),
    "Arcee": ("Arcee", {}),
    "SeedOss": ("SeedOss", {"head_dim": 8}),
    "HunYuan dense": ("HunYuanDenseV1", {"head_dim": 8}),
    "Diffllama": ("DiffLlama", {}),
    "Bitnet": ("BitNet", {}),
        "MiniCPM 3": ("MiniCPM3", {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 8,
        "kv_lora_rank": 8, "num_key_value_heads": 4, "dim_model_base": 32, "scale_emb": 1, "initializer_range": 0.02}),
    "NanoChat": ("NanoChat", {"final_logit_softcapping": 3.0}),
    "VaultGemma": ("VaultGemma", {"head_dim": 8}),
    "Mixtral": ("Mixtral", EXPERTS),
    "Mixtral, router logits on": ("Mixtral", {"output_router_logits": True, **EXPERTS}),
    "Qwen 2 MoE": ("Qwen2Moe", {"shared_expert_intermediate_size": 24, **EXPERTS}),
    "Qwen 3 MoE": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "OLMoE": ("Olmoe", EXPERTS),
    "Phi-MoE": ("Phimoe", EXPERTS),
    "gpt-oss": ("GptOss", {"head_dim": 8, "sliding_window": 6, **EXPERTS}),
        "DeepSeek 2": ("DeepseekV2", {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim":
        4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "num_key_value_heads": 4}),
        "DeepSeek 3": ("DeepseekV3", {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
        "Llama 4 text": ("Llama4Text", {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2,
        "attention_chunk_size": 16}),
    "GPT-2": ("GPT2", None, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
        "GPT-Neo": ("GPTNeo", None, {"hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "num_heads": 4, "max_position_embeddings": 128, "window_size": 6}),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": None}),
    "GPT-J": ("GPTJ", None, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
        "OPT, layerdrop": ("OPT", None, {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
        "num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 128, "layerdrop": 0.5,
        "init_std": 0.15}),
        "XGLM, layerdrop": ("XGLM", None, {"d_model": 32, "num_layers": 2, "ffn_dim": 48, "attention_heads": 4,
        "max_position_embeddings": 128, "layerdrop": 0.5, "init_std": 0.15}),
    "BLOOM": ("Bloom", None, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MPT": ("Mpt", None, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
        "Falcon, ALiBi": ("Falcon", None, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi":
        True, "max_position_embeddings": 128}),
    "CodeGen": ("CodeGen", None, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "BioGPT": ("BioGpt", {"num_key_value_heads": None}),
    "Persimmon": ("Persimmon", {"num_key_value_heads": None}),
        "Qwen3-Next": ("Qwen3Next", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 24, **EXPERTS}),
        "Qwen 3.5 text": ("Qwen3_5Text", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
        "Mamba 2": ("Mamba2", None, {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
        "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "Mamba": ("Mamba", None, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
        "Nemotron-H": ("NemotronH", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "head_dim": 8}),
        "Granite hybrid": ("GraniteMoeHybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8, "shared_intermediate_size":
        32, "logits_scaling": 3.0, **EXPERTS}),
        "Bamba": ("Bamba", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8}),
        "Jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False, **EXPERTS}),
        "Zamba 2": ("Zamba2", {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "mamba_headdim": 8, "num_mem_blocks": 1, "num_key_value_heads": 4}),
        "Falcon-H1": ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8, "lm_head_multiplier": 0.5}),
        "RecurrentGemma": ("RecurrentGemma", {"lru_width": 32, "block_types": ["recurrent", "attention"],
        "attention_window_size": 6, "logits_soft_cap": 3.0}),
        "MiniMax": ("MiniMax", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "block_size": 8,
        **EXPERTS}),
    "RWKV": ("Rwkv", None, {"hidden_size": 32, "num_hidden_layers": 2}),
    "XLNet": ("XLNet", None, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
        "Phi-3, longrope": ("Phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": 12,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [4.0, 4.0, 4.0, 4.0]}}),
    "BERT as a decoder": ("Bert", {"num_key_value_heads": None, "is_decoder": True}),
}


def build(name: str, seed: int = 0):
    """A tiny random model of the family in float32 and eval mode. AttributeError where this transformers lacks it."""
    family, changes, *alone = FAMILIES[name]
    settings = {**OLD, **alone[0]} if changes is None else {k: v for k, v in {**SMALL,
        **changes}.items() if v is not None or k.endswith("token_id")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, family + "Config")(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    models.leave_out_auxiliary_loss(model)
    return model


def character_examples():
    """(tokenizer, task) of sums of unlike length, for any of these models."""
    tokenizer = character_tokenizer()
    examples = [Example(question, "1", terse=question) for question in ("1+1=", "12+3=", "123+45=", "5+123456=",
        "9+9=")]
    return tokenizer, Task("addition", examples, examples)


def reference(model, prompt, prompt_mask, tokens, mask):
    """log π of every response token and the entropy, each (B, T): one unpadded row at a time,
        by the model's own forward."""
    group, rows = len(tokens) // len(prompt), []
    for i, (row, kept) in enumerate(zip(tokens, mask)):
        question, answer = prompt[i // group][prompt_mask[i // group]], row[kept]
        logits = model(input_ids=torch.cat([question, answer])[None], use_cache=False).logits[0].float() / TEMPERATURE
        scores = torch.log_softmax(logits[len(question) - 1: -1], -1)
        values = torch.stack([scores.gather(-1, answer[:, None])[:, 0], -(scores.exp() * scores).sum(-1)])
        rows.append(torch.nn.functional.pad(values, (0, len(row) - len(answer))))
    return torch.stack(rows, 1)


def gradients(model, values):
    """The gradient of a weighted sum of the values, all weights in one row."""
    weights = torch.cos(torch.arange(values.numel(), dtype=values.dtype)).view_as(values)
    found = torch.autograd.grad((values * weights).sum(), list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def prompts(lengths=(9, 5, 8)):
    generator, width = torch.Generator().manual_seed(1), max(lengths)
    prompt = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    return prompt, torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def measure(model, engine, *, max_new_tokens=10, group_size=4):
    """Largest errors of an engine: sampler, trainer, entropy, and gradient (as a share of its largest entry)."""
    generate, token_logprobs = engine
    prompt, prompt_mask = prompts()
    tokens, mask, old = generate(model, prompt, prompt_mask, group_size=group_size, max_new_tokens=max_new_tokens,
                                 temperature=TEMPERATURE, eos_ids={0, 1, 2}, pad_id=0,
                                 generator=torch.Generator().manual_seed(2))
    want, want_entropy = reference(model, prompt, prompt_mask, tokens, mask)
    have, entropy = token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask, temperature=TEMPERATURE)
    right, mine = gradients(model, want), gradients(model, have)
    return ((old - want).abs().max().item(), (have - want).abs().max().item(),
        (entropy - want_entropy).abs().max().item(),
            ((mine - right).abs().max() / right.abs().max()).item())


def examine(name: str, *, checkpointing: bool = False) -> dict:
    """What a run on this family would do: the engine that --engine auto takes, the self-check's error,
        and how far the ratios
    of a fresh batch are from 1 after a step with learning rate 0. Where it is refused: the reason."""
    model, (tokenizer, task) = build(name), character_examples()
    config = lm.Config(algorithm="reinforce-is", prompts_per_step=4, group_size=4, max_new_tokens=12,
        micro_batch_tokens=64,
                       temperature=TEMPERATURE, gradient_checkpointing=checkpointing)
    found = {"family": name, "model": type(model).__name__}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if checkpointing:
                models.recompute_activations(model)
            config = engines.choose_engine(model, tokenizer, task, config, lm.ENGINES)
            found["error"] = engines.self_check(model, tokenizer, task, config, lm.ENGINES[config.engine])
    except UserError as error:
        return found | {"engine": "refused", "reason": str(error)}
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2):  # after a step, since a step may leave a model in another mode
        batch = lm.collect(model, tokenizer, task.train[:4], config, version=step, generator=generator)
        batch.rewards = torch.rand(batch.rewards.shape, generator=generator)  # so that every response has a gradient
        metrics = lm.train_step(model, optimizer, batch, config, algorithm=lm.ALGORITHMS["reinforce-is"],
        generator=generator)
    ratios = [metrics[key] for key in ("ratio_p05", "ratio_p95", "ratio_max")]
    return found | {"engine": config.engine, "ratio": max(abs(ratio - 1) for ratio in ratios)}


def table(rows: list) -> str:
    lines = ["| family | model class | --engine auto takes | largest error, nats | largest \\|ρ − 1\\| on fresh data |",
             "|---|---|---|---|---|"]
    for row in rows:
        numbers = f"{row.get('error', 0):.0e} | {row.get('ratio', 0):.0e}"
        if row["engine"] == "refused":
            numbers = row["reason"].partition(": ")[2] + " | –"
        lines.append(f"| {row['family']} | `{row['model']}` | {row['engine']} | {numbers} |")
    return "\n".join(lines)


PAGE = """# Which architectures train

Made by `python benchmarks/architectures.py` with transformers {version}; a test makes it again. Tiny random models of
each family, in float32. Sampler and trainer are held against the model's own forward pass on single, unpadded rows,
with questions short and long, at a temperature of .8; then a batch is sampled and a step with learning rate 0 taken,
after which every ratio must be 1. The same check runs, on the real model, at the start of every run.

`fast` shares prompts and common beginnings. `plain` and `uncached` are the functions of 06 itself, for models whose
memory is no list of keys and values (recurrent and hybrid ones): slower, and right. What is refused is refused before
training, with the reason. The auxiliary loss that balances a mixture of experts is left out of the policy gradient: it
is no part of the objective, and the sampler's log-probabilities do not have it.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only print these (default: all, and write the page)")
    args = parser.parse_args()
    rows = [examine(name) for name in args.families or FAMILIES]
    if args.families:
        return print(table(rows))
    write_text(ROOT / "docs" / "architectures.md", PAGE.format(version=transformers.__version__, table=table(rows)))
    print(f"{sum(row['engine'] != 'refused' for row in rows)} of {len(rows)} families train; docs/architectures.md")


if __name__ == "__main__":
    main()
