"""Split a batch into passes that fit a token budget, and keep sharded processes in step with each other."""

import torch

from under_the_hood import parallel
from under_the_hood.models import recomputes


def micro_batches(model, batch, advantages, config, algorithm):
    """Yield ((prompts, rows, width, with_gradient), counts) for each pass of a step; counts: 0 or 1, see in_step.

    Without a regulariser a group whose advantages are all 0 has no gradient: it only runs forward, for the metrics.
    """
    lengths, sharded = batch.mask.sum(1).view_as(batch.rewards), parallel.is_sharded(model)
    always = sharded or algorithm.tau > 0 or algorithm.beta > 0 or algorithm.process_weight is not None
    has_gradient = (advantages != 0).any(1) | always
    prompt_copies = lengths.shape[1] if sharded or recomputes(model) else 1  # one for each response, or for the group
    parts = split_batch(lengths, batch.prompt.shape[1] * prompt_copies, has_gradient, budget=config.micro_batch_tokens)
    yield from parallel.in_step(list(parts), sharded=sharded)


def split_batch(lengths, prompt_tokens: int, has_gradient, *, budget: int):
    """Split a batch into passes of at most `budget` tokens, padding included, and at least one prompt.

    lengths: (P, K) of the responses; prompt_tokens: of one group's prompt, copies included; has_gradient: (P,).
    Yields (prompts, rows, width, with_gradient). Groups of like length go together; a pass is as wide as its longest
    response. Groups without a gradient get passes of their own, unless they are too few to be worth it. If no group
    has one, all run with gradients (of 0), so that the optimizer's momentum still acts.
    """
    longest, group = lengths.amax(1), lengths.shape[1]
    if not 0 < has_gradient.float().mean() < 0.75:
        has_gradient = torch.ones_like(has_gradient)
    for wanted in (True, False):
        order = longest.argsort(descending=True, stable=True)
        order = order[has_gradient[order] == wanted]
        while len(order):
            width = int(longest[order[0]])
            part = order[: max(1, budget // (prompt_tokens + group * width))].sort().values
            order = order[len(part):]
            yield part, (part[:, None] * group + torch.arange(group, device=part.device)).flatten(), width, wanted
