"""`generate` and `token_logprobs` of 06 again, under the same names and with equal results, faster.

Time is lost by computing something twice and by computing padding. So responses share their prompt, and any beginning
that several of them sampled, in sampling and in training. Memory is lost to the logits. So only states of real
response tokens reach the output head, a chunk at a time, and the backward pass recomputes each chunk.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from under_the_hood.models import forward_parameters, in_eval_mode, model_inputs, recomputes, without_autograd
from under_the_hood.parallel import is_sharded


@without_autograd
@in_eval_mode
def generate(model, prompt, prompt_mask, *, group_size: int, max_new_tokens: int, temperature: float, eos_ids,
             pad_id: int, generator):
    """As 06's: (P, L) left-padded prompts → tokens, mask, logprobs, each (B, T), B = P·group_size.

    A prompt runs through the model once for its group, and so does each beginning that several responses sampled. So
    the cache has fewer rows than there are responses: response i reads its logits at row cache_row[i].
    """
    from transformers import DynamicCache

    cache, batch, device = DynamicCache(config=model.config), prompt.shape[0] * group_size, prompt.device
    attention = prompt_mask
    logits = model(**model_inputs(model, prompt, attention, cache), logits_to_keep=1).logits[:, -1]
    tokens = torch.full((batch, max_new_tokens), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(batch, max_new_tokens, device=device)
    mask = torch.zeros(batch, max_new_tokens, dtype=torch.bool, device=device)
    rows = torch.arange(batch, device=device)  # the responses still in the batch
    running, cache_row = torch.ones_like(rows, dtype=torch.bool), rows // group_size  # running: has not ended yet
    stops = torch.tensor(sorted(eos_ids), device=device)
    for t in range(max_new_tokens):
        scores = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        if scores.isnan().any():
            raise FloatingPointError("the model's logits are not finite")
        scores, vocabulary = scores[cache_row], scores.shape[1]
        if temperature == 0:
            token = scores.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens[rows, t], logprobs[rows, t], mask[rows, t] = token[:, 0], scores.gather(1, token)[:, 0], True
        token = token[:, 0]
        running = running & ~torch.isin(token, stops)
        if t + 1 == max_new_tokens or not running.any():
            break
        if running.float().mean() < 0.75:  # removing finished responses copies the cache: only if many have finished
            rows, cache_row, token, running = rows[running], cache_row[running], token[running], running[running]
        # The new rows of the cache: each different (row it continues, next token) gets one.
        branches, cache_row = torch.unique(cache_row * vocabulary + token, return_inverse=True)
        parent, token = branches // vocabulary, branches % vocabulary
        if len(parent) != len(attention) or (parent[1:] == parent[:-1]).any():
            cache.batch_select_indices(parent)
            attention = attention[parent]
        attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)
        logits = model(**model_inputs(model, token[:, None], attention, cache)).logits[:, -1]
    ends = torch.isin(tokens, stops) & mask
    mask &= ends.long().cumsum(1) - ends.long() == 0  # drops what a response sampled after its end, while others ran
    width = int(mask.sum(1).max())
    return (tokens[:, :width].masked_fill(~mask[:, :width], pad_id), mask[:, :width],
            logprobs[:, :width].masked_fill(~mask[:, :width], 0.0))


@in_eval_mode
def token_logprobs(model, prompt, completion, *, prompt_mask=None, mask=None, temperature: float = 1.0, chunk_size=None,
                   way: str = "auto"):
    """As 06's: log π_θ of each completion token and the entropy there, two (B, T) float32 tensors, 0 where masked.

    way: how the hidden states are made; the results are equal. "whole": each response behind a copy of its prompt, the
    only way under gradient checkpointing and sharding. "shared": the prompt once, then the responses. "packed": the
    prompt and all its responses in one row, common beginnings once. "auto": packed for short groups, shared for long
    ones. ValueError: B is no multiple of P, or a mask has a hole.

    Memory: logits of all positions would be (B, T, V). So only states of real completion tokens reach the head, a
    chunk at a time, and the backward pass recomputes each chunk.
    """
    if completion.shape[0] % prompt.shape[0]:
        raise ValueError(f"{completion.shape[0]} completions cannot be split evenly over {prompt.shape[0]} prompts")
    prompt_mask = torch.ones_like(prompt, dtype=torch.bool) if prompt_mask is None else prompt_mask
    mask = torch.ones_like(completion, dtype=torch.bool) if mask is None else mask
    if way == "auto":
        short = prompt.shape[1] + completion.numel() // prompt.shape[0] <= 512
        way = ways(model)[0 if short else -1]
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("mask must be True for a row's first tokens and False behind them, without holes")
    if not mask.any():
        return torch.zeros(mask.shape, device=mask.device), torch.zeros(mask.shape, device=mask.device)
    states_of = {"whole": whole_sequence_states, "shared": shared_prompt_states, "packed": packed_states}[way]
    states, chosen = states_of(model, prompt, prompt_mask, completion, mask)

    targets = completion.flatten()[chosen]
    chunk_size = chunk_size or max(1, 10_000_000 // model.get_output_embeddings().weight.shape[0])  # 38 MiB of float32
    pieces = []
    for begin in range(0, len(targets), chunk_size):
        piece = functools.partial(_chosen_logprobs, model, temperature=temperature)
        arguments = states[begin: begin + chunk_size], targets[begin: begin + chunk_size]
        recompute = torch.is_grad_enabled() and len(targets) > chunk_size
        pieces.append(checkpoint(piece, *arguments, use_reentrant=False) if recompute else piece(*arguments))
    logprobs, entropy = (torch.cat(part) for part in zip(*pieces))
    empty = torch.zeros(completion.shape, device=completion.device)
    places = torch.unravel_index(chosen, completion.shape)
    return empty.index_put(places, logprobs), empty.index_put(places, entropy)


def ways(model) -> tuple:
    """The ways that "auto" may take on this model: the one for short groups first, the one for long groups last."""
    if is_sharded(model) or recomputes(model):
        return ("whole",)
    return ("packed", "shared") if packable(model) else ("shared",)


def whole_sequence_states(model, prompt, prompt_mask, completion, mask):
    """The states that predict completion tokens, (N, H), and the flat places of those tokens in (B, T).

    Each prompt runs again for each of its completions. The state at position i predicts token i + 1, so the states
    that predict a completion begin at the last token of the prompt.
    """
    group, body = completion.shape[0] // prompt.shape[0], model.base_model
    tokens = torch.cat([prompt.repeat_interleave(group, 0), completion], 1)
    attention = torch.cat([prompt_mask.repeat_interleave(group, 0), mask], 1)
    states = body(**model_inputs(body, tokens, attention, use_cache=False)).last_hidden_state
    return states[:, prompt.shape[1] - 1: -1][mask], mask.flatten().nonzero()[:, 0]


def shared_prompt_states(model, prompt, prompt_mask, completion, mask):
    """The same, but a group shares its prompt, as in `generate`.

    The prompts run once, *with* gradients. Their keys and values are repeated for the group, and autograd sums the
    gradients of the copies. Then the completions run, a block of columns at a time, without those that have ended.
    """
    from transformers import DynamicCache

    group, body, cache = completion.shape[0] // prompt.shape[0], model.base_model, DynamicCache(config=model.config)
    last = body(**model_inputs(body, prompt, prompt_mask, cache)).last_hidden_state[:, -1].repeat_interleave(group, 0)
    states, chosen = [last[mask[:, 0]]], [mask[:, 0].nonzero()[:, 0] * completion.shape[1]]
    attention = torch.cat([prompt_mask.repeat_interleave(group, 0), mask], 1)
    places = torch.arange(completion.numel(), device=completion.device).view_as(completion)
    rows = torch.arange(len(prompt), device=prompt.device).repeat_interleave(group)  # of the cache, by completion
    for begin, end, still in column_blocks(mask):
        cache.batch_select_indices(rows[still])
        rows = torch.empty_like(rows).index_copy(0, still, torch.arange(len(still), device=still.device))
        inputs = model_inputs(body, completion[still, begin:end], attention[still, : prompt.shape[1] + end], cache)
        predicted = mask[still, begin + 1: end + 1]
        states.append(body(**inputs).last_hidden_state[predicted])
        chosen.append(places[still, begin + 1: end + 1][predicted])
    return torch.cat(states), torch.cat(chosen)


def packable(model) -> bool:
    """Does the model follow our mask and positions alone? Not with a sliding window, or an attention bias (ALiBi)."""
    config = model.config.get_text_config()
    only_kind = "sliding" if getattr(config, "sliding_window", None) else "full_attention"
    layers = getattr(config, "layer_types", None) or [only_kind]
    return ("position_ids" in forward_parameters(type(model.base_model)) and config._attn_implementation == "sdpa"
            and set(layers) == {"full_attention"}
            and not getattr(config, "alibi", False) and not config.is_encoder_decoder)


def packed_states(model, prompt, prompt_mask, completion, mask):
    """The same, in one pass with hardly any padding and nothing computed twice.

    A prompt and all responses of its group stand in one row, where a common beginning of several responses stands
    once. So a group is a tree, and a mask lets each token see its ancestors only. Two groups share a row, the longest
    with the shortest, so that rows have similar lengths. Attention is computed for all pairs of tokens in a row,
    which is cheap for short rows only.
    """
    (count, length), width, device = prompt.shape, completion.shape[1], prompt.device
    group, columns = len(completion) // count, torch.arange(width, device=device)
    # The inputs: all tokens but the last of a response, which predicts nothing that is trained on.
    inputs = (columns < (mask * columns).amax(1, keepdim=True)).view(count, group, width)
    tokens = completion.view(count, group, width)
    # first[p, k, t]: the first response of group p whose tokens up to column t are those of response k.
    known = tokens.where(inputs, -1)
    first = (known[:, :, None] == known[:, None]).byte().cumprod(-1).argmax(2)
    # A group has L slots for its prompt, then T for each response. used: real tokens; a shared one counts only once.
    own = first == torch.arange(group, device=device)[:, None]
    used = torch.cat([prompt_mask, (inputs & own).flatten(1)], 1)
    position = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    position = torch.cat([position, (position[:, -1:] + 1 + columns).repeat(1, group)], 1)
    # A row: the used slots of two groups, in order. With an odd number of groups one of them has a row to itself.
    by_size, rows = used.sum(1).argsort(), (count + 1) // 2
    pair = torch.stack([by_size[:rows], by_size.flip(0)[:rows]], 1)
    kept = used[pair]
    kept[:, 1] &= (pair[:, 0] != pair[:, 1])[:, None]
    kept = kept.flatten(1)
    order = kept.byte().argsort(dim=1, descending=True, stable=True)[:, : int(kept.sum(1).max())]
    kept, owner, slot = kept.gather(1, order), pair.gather(1, order // used.shape[1]), order % used.shape[1]
    response, column = (slot - length).clamp(min=0) // width, (slot - length) % width
    # A token sees its prompt, and the slot (response, column) if that is where its own beginning up to there stands.
    beginning = first[owner[:, :, None], response[:, :, None], column[:, None]]
    sees = (owner[:, :, None] == owner[:, None]) & ((slot < length)[:, None] | (beginning == response[:, None]))
    sees = sees.tril() | torch.eye(order.shape[1], dtype=torch.bool, device=device)
    packed = torch.cat([prompt, tokens.flatten(1)], 1)[owner, slot]
    states = model.base_model(input_ids=packed, attention_mask=sees[:, None], position_ids=position[owner, slot],
                              use_cache=False).last_hidden_state
    # Token t > 0 is predicted by the slot where its beginning up to t − 1 ends; token 0 by the prompt's last slot.
    end_of_beginning = (length + first * width + columns)[..., :-1]
    predictor = torch.cat([torch.full_like(first[..., :1], length - 1), end_of_beginning], -1)
    place = torch.zeros_like(used, dtype=torch.long)
    place[owner[kept], slot[kept]] = kept.flatten().nonzero()[:, 0]
    place = place.gather(1, predictor.flatten(1)).view_as(completion)[mask]
    return states.flatten(0, 1).index_select(0, place), mask.flatten().nonzero()[:, 0]


def column_blocks(mask, *, worthwhile: int = 512):
    """Yield (begin, end, rows): run columns begin … end−1 for these rows, those that still have tokens there.

    When a few responses are long, one block of full width would be mostly padding. A block ends where dropping the
    finished rows saves the most padding tokens, but only if it saves at least `worthwhile` of them, since one more
    pass has its fixed cost. The last token of a response predicts nothing that is trained on, so it is not run.
    """
    inputs = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1)  # the index of each row's last token
    begin, width = 0, int(inputs.max())
    while begin < width:
        rows = (inputs > begin).nonzero()[:, 0]
        ends = torch.arange(begin + 1, width + 1, device=mask.device)
        saved = (inputs[rows, None] <= ends).sum(0) * (width - ends)
        end = int(ends[saved.argmax()]) if saved.max() >= worthwhile else width
        yield begin, end, rows
        begin = end


class BodyOutput(dict):
    """Hidden states as a model's forward pass expects them from its body, whatever else it may ask for."""
    __getattr__ = dict.get

    def __getitem__(self, key):
        return self.get("last_hidden_state" if key == 0 else key)


def logits_of(model, states):
    """The logits that the model makes of hidden states, (N, H) → (N, V): its own forward pass without its body.

    The head alone is not enough: Gemma caps the logits, Granite and Cohere scale them, BERT has more layers there. So
    the model's forward pass runs with a body that returns `states`. ValueError: the model does not call its body.
    """
    calls, bodies = [], {model.base_model, model.get_decoder()} - {model}

    def passed_over(*_, **__):
        calls.append(True)
        return BodyOutput(last_hidden_state=states[None])

    for body in bodies:
        body.forward = passed_over
    try:
        logits = model.forward(input_ids=states.new_zeros(1, len(states), dtype=torch.long), use_cache=False).logits[0]
    finally:
        for body in bodies:
            del body.forward
    if not calls:
        raise ValueError(f"the forward pass of {type(model).__name__} does not call its body")
    return logits


def _chosen_logprobs(model, states, targets, *, temperature):
    logits = logits_of(model, states).float()
    logits = logits / temperature if temperature != 1 else logits
    chosen, log_normaliser = LogSoftmaxAt.apply(logits, targets)
    with torch.no_grad():  # last: a recomputation in the backward pass stops when the gradient has what it needs
        entropy = log_normaliser - (logits - log_normaliser[:, None]).exp_().mul_(logits).sum(-1)
    return chosen, entropy


class LogSoftmaxAt(torch.autograd.Function):
    """log softmax(logits) at one token of each row, (N, V), (N,) → (N,), and the log-normaliser without a gradient.

    Its gradient, onehot − softmax, takes one more array of the logits' size; autograd would take several for it.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        log_normaliser = logits.logsumexp(-1)
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.mark_non_differentiable(log_normaliser)
        return logits.gather(-1, targets[:, None])[:, 0] - log_normaliser, log_normaliser

    @staticmethod
    def backward(ctx, gradient, _):
        logits, targets, log_normaliser = ctx.saved_tensors
        spread = (logits - log_normaliser[:, None]).exp_().mul_(-gradient[:, None])
        return spread.scatter_add_(1, targets[:, None], gradient[:, None]), None
