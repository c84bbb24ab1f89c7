"""`generate` of 06 through transformers' continuous batching: for long responses of different lengths on a GPU."""

import torch

from under_the_hood import fast
from under_the_hood.errors import UserError


def generate(model, prompt, prompt_mask, *, group_size: int, max_new_tokens: int, temperature: float, eos_ids,
             pad_id: int, generator):
    """As 06's, by continuous batching: when a response ends, the next one takes its place at once.

    Keys and values lie in pages, so that long and short responses share a batch without padding. Greedy answers come
    from fast.generate.
    """
    if temperature == 0:
        return fast.generate(model, prompt, prompt_mask, group_size=group_size, max_new_tokens=max_new_tokens,
                             temperature=0, eos_ids=eos_ids, pad_id=pad_id, generator=generator)
    from transformers import ContinuousBatchingConfig, GenerationConfig

    on_gpu = prompt.device.type == "cuda"
    sizes = {"max_memory_percent": 0.5} if on_gpu else {"num_blocks": 512, "max_batch_tokens": 512, "page_size": 16}
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    answers = model.generate_batch(
        [ids[keep].tolist() for ids, keep in zip(prompt.cpu(), prompt_mask.cpu())],
        generation_config=GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, pad_token_id=pad_id,
            eos_token_id=sorted(eos_ids), max_new_tokens=max_new_tokens, num_return_sequences=group_size),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True, seed=seed, auto_switch_to_flash=False, **sizes))
    answers = list(answers.values())
    if len(answers) < len(prompt) * group_size or any(answer.error for answer in answers):
        raise UserError("continuous batching lost some responses; use --engine plain")
    lengths = torch.tensor([len(answer.generated_tokens) for answer in answers])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.full(mask.shape, pad_id)
    tokens[mask] = torch.tensor([token for answer in answers for token in answer.generated_tokens])
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = torch.tensor([value for answer in answers for value in answer.logprobs])
    return tokens.to(prompt.device), mask.to(prompt.device), logprobs.to(prompt.device)
