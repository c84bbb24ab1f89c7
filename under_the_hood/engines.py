"""Which engine samples, and the proof that sampler and trainer describe one distribution on this model."""

from dataclasses import replace

import torch

from under_the_hood import parallel
from under_the_hood.errors import one_line, require
from under_the_hood.models import autocast, encode_prompts, stop_ids
from under_the_hood.tasks import batch_examples


def choose_engine(model, tokenizer, task, config, engines: dict):
    """The configuration with --engine auto decided: paged on a GPU where it passes its self-check, else fast.

    engines: name → (generate, token_logprobs). UserError when the chosen one fails its self-check.
    """
    if config.engine == "auto" and model.device.type == "cuda":
        attention = model.config._attn_implementation
        try:
            paged = replace(config, engine="paged")
            self_check(model, tokenizer, task, paged, engines)
            return paged
        except Exception as error:  # whatever an engine of another package may raise
            model.set_attn_implementation(attention)
            parallel.print_rank0(f"--engine paged does not work here ({one_line(error)}); sampling with the fast loop")
    chosen = replace(config, engine="fast" if config.engine == "auto" else config.engine)
    self_check(model, tokenizer, task, chosen, engines)
    return chosen


def self_check(model, tokenizer, task, config, engines: dict, *, tolerance: float | None = None) -> float:
    """Sample one batch and compare the sampler's log-probabilities with the trainer's. Returns the largest difference.

    Without this check a wrong temperature, position, mask or head would go unnoticed, and every ratio would differ
    from 1 before the first update.
    """
    generate, token_logprobs = engines[config.engine]
    examples = batch_examples(task.train, 1, count=min(4, config.prompts_per_step), seed=config.seed)
    with torch.no_grad(), autocast(config, model.device) as cast:
        prompt, prompt_mask = encode_prompts(tokenizer, examples, device=model.device)
        tokens, mask, old_logprobs = generate(
            model, prompt, prompt_mask, group_size=config.group_size, max_new_tokens=config.max_new_tokens,
            temperature=config.temperature, eos_ids=stop_ids(model, tokenizer), pad_id=tokenizer.pad_token_id,
            generator=torch.Generator(model.device).manual_seed(0))
        logprobs, _ = token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask,
                                     temperature=config.temperature)
    difference = (logprobs - old_logprobs).abs().max().item()
    tolerance = tolerance or (0.5 if cast else 1e-3)
    require(difference <= tolerance,
            f"the sampler's and the trainer's log-probabilities differ by {difference:.2g}, more than {tolerance}: "
            f"the architecture {type(model).__name__} is not supported")
    parallel.print_rank0(f"self-check: sampler and trainer log-probabilities agree to {difference:.1e}")
    return difference
