"""Which engine samples and scores, and the check, before a run, that both describe one distribution on this model."""

from dataclasses import replace

import torch

from under_the_hood import fast, parallel
from under_the_hood.errors import UserError, one_line, require
from under_the_hood.models import (autocast, context_length, encode_prompts, model_inputs, recomputes, recomputing,
                                   sliding_window, stop_ids)

TOLERANCE = 1e-3  # nats, in float32; right implementations differ by 1e-6 to 1e-5


def choose_engine(model, tokenizer, task, config, engines: dict):
    """The configuration with --engine decided. engines: name → (generate, token_logprobs).

    auto tries paged on a GPU, then fast, then plain, then uncached (recurrent models need one of the last two), and
    takes the first that passes the self-check. UserError, with the last one's reason, when none does.
    """
    names = [config.engine]
    if config.engine == "auto":
        names = ["paged"] * (model.device.type == "cuda") + ["fast", "plain", "uncached"]
    attention = model.config._attn_implementation
    for name in names:
        try:
            self_check(model, tokenizer, task, config, engines[name])
            return replace(config, engine=name)
        except Exception as error:  # noqa: BLE001 (an engine may raise anything on what it does not know)
            reason = one_line(error)
        if name == "paged":
            model.set_attn_implementation(attention)
        if name != names[-1]:
            parallel.print_rank0(f"--engine {name} does not suit {type(model).__name__}: {reason}")
    raise UserError(f"{type(model).__name__} cannot be trained here with --engine {config.engine}: {reason}")


def self_check(model, tokenizer, task, config, engine) -> float:
    """Sample a few responses, score them again, and hold both against the model's own logits of single, unpadded rows.

    Without it a wrong temperature, position, mask or head would go unnoticed, and every ratio would differ from 1
    before the first update. It tries short and long questions, every sampling temperature, every way that the trainer
    may take, and gradient checkpointing where that is on; always in float32. Returns the largest difference, in nats.
    """
    generate, token_logprobs = engine
    ways = [{"way": way} for way in fast.ways(model)] if token_logprobs is fast.token_logprobs else [{}]
    settings, worst = sampling_settings(model, tokenizer, config), 0.0
    for prompt, prompt_mask in probes(model, tokenizer, task, config):
        heats = (1, 1.2, 0.8) if config.algorithm == "aepo" else (1,)
        for temperature in [config.temperature * heat for heat in heats]:
            generator = torch.Generator(model.device).manual_seed(0)
            with torch.no_grad():
                tokens, mask, old = generate(model, prompt, prompt_mask, temperature=temperature, generator=generator,
                                             **settings)
                own, rows = single_rows(model, prompt, prompt_mask, tokens, mask, temperature=temperature)
            differences = {"sampler": (old[rows] - own).abs().max()}
            for way in ways:
                scored = {"prompt_mask": prompt_mask, "mask": mask, "temperature": temperature, **way}
                with torch.set_grad_enabled(recomputes(model)):  # checkpointing acts where gradients are wanted
                    new, _ = token_logprobs(model, prompt, tokens, **scored)
                differences["trainer " + way.get("way", "")] = (new.detach() - old).abs().max()
            if recomputes(model):
                differences["recomputed gradient"] = gradient_error(model, token_logprobs, prompt, tokens, **scored)
            for name, difference in differences.items():
                require(bool(difference <= TOLERANCE), f"its {name.strip()} differs from the model's own logits by "
                        f"{difference:.2g} nats with prompts of {prompt_mask.sum(1).min()} to {prompt.shape[1]} tokens")
            worst = max(worst, *map(float, differences.values()))
    parallel.print_rank0(f"self-check: sampler and trainer log-probabilities agree to {worst:.1e}")
    return worst


def compute_gap(sampler, token_logprobs, tokenizer, task, config, engine) -> dict:
    """What bfloat16 and sharding change: |Δ log π| between sampler and trainer as the run will use them, as metrics.

    Nothing in float32 with whole weights: the self-check has measured that already.
    """
    with torch.no_grad(), autocast(config, sampler.device) as cast:
        if not (cast or config.shard):
            return {}
        prompt, prompt_mask = next(probes(sampler, tokenizer, task, config))
        generator = torch.Generator(sampler.device).manual_seed(0)
        tokens, mask, old = engine[0](sampler, prompt, prompt_mask, temperature=config.temperature, generator=generator,
                                      **sampling_settings(sampler, tokenizer, config))
        new, _ = token_logprobs(prompt, tokens, prompt_mask=prompt_mask, mask=mask, temperature=config.temperature)
    gap = (new - old).abs()[mask]
    parallel.print_rank0(f"as this run computes, sampler and trainer differ by {gap.mean():.1e} nats on average, "
                         f"{gap.max():.1e} at most")
    require(bool(cast) or gap.max().item() <= TOLERANCE,
            f"with --shard, log-probabilities differ by {gap.max():.2g} nats")
    return {"compute_gap_mean": gap.mean().item(), "compute_gap_max": gap.max().item()}


def sampling_settings(model, tokenizer, config) -> dict:
    return {"max_new_tokens": min(config.max_new_tokens, 24), "group_size": min(config.group_size, 4),
            "eos_ids": stop_ids(model, tokenizer), "pad_id": tokenizer.pad_token_id}


def probes(model, tokenizer, task, config):
    """Yield (prompt, prompt_mask) of up to four questions, the shortest and the longest among them.

    Where a run can exceed a layer's sliding window, also of random tokens: one prompt longer than it, and a short one.
    """
    by_length = sorted(task.train[:256], key=lambda example: len(example.question))
    examples = list(dict.fromkeys([by_length[0], by_length[-1], *task.train[:2]]))
    prompt, prompt_mask = encode_prompts(tokenizer, examples, device=model.device)
    yield prompt, prompt_mask
    window = sliding_window(model)
    if window < prompt.shape[1] + config.max_new_tokens:
        width = min(window + 3, context_length(model) - config.max_new_tokens)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(model.get_input_embeddings().num_embeddings, (2, width), generator=generator)
        starts = torch.tensor([[0], [max(0, width - 3)]], device=model.device)
        yield rows.to(model.device), torch.arange(width, device=model.device) >= starts


def single_rows(model, prompt, prompt_mask, tokens, mask, *, temperature):
    """(log π of some rows, (R, T), which): each row alone and unpadded through the model's own forward pass."""
    group_size, rows = len(tokens) // len(prompt), torch.arange(0, len(tokens), 3)
    own = torch.zeros(len(rows), tokens.shape[1], device=tokens.device)
    for i, row in enumerate(rows.tolist()):
        question, answer = prompt[row // group_size][prompt_mask[row // group_size]], tokens[row][mask[row]]
        sequence = torch.cat([question, answer])[None]
        logits = model(**model_inputs(model, sequence, torch.ones_like(sequence), use_cache=False)).logits[0]
        scores = torch.log_softmax(logits[len(question) - 1: -1].float() / temperature, -1)
        own[i, : len(answer)] = scores.gather(-1, answer[:, None])[:, 0]
    return own, rows


def gradient_error(model, token_logprobs, prompt, tokens, **scored):
    """Largest difference that recomputation makes to the gradient of the small weights (norms, biases), as a share."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    weights = [weight for weight in trained if weight.numel() <= 2**20][:32] or trained[:1]
    gradients = []
    for on in (True, False):
        with recomputing(model, on):
            new, _ = token_logprobs(model, prompt, tokens, **scored)
            found = torch.autograd.grad((new * torch.cos(new.detach() * 7)).sum(), weights, allow_unused=True)
        gradients.append(torch.cat([g.flatten() for g in found if g is not None]))
    return (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max().clamp(min=1e-30)
