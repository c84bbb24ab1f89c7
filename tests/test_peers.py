"""Ours against what others wrote: transformers' generate and loss, torch's divergence.

TRL's and verl's losses, advantages and KL estimators stand beside the examples that use them, for they need an
environment of their own: tests/examples/test_with_trl.py, test_with_verl.py (`make .venv-bench/ready`).
Published formulas by hand: group advantages and leave-one-out in test_02_group_baseline.py, k3 in test_06_losses.py,
pass@k against all subsets in under_the_hood/test_evaluation.py. Greedy tokens are transformers' in test_06_train.py.
"""

import importlib

import pytest
import torch
from conftest import build_model, left_padded
from under_the_hood import fast

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
PROMPTS, ENDS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]], [2, 17, 23, 5, 8]


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen2"])
def sampled(request):
    """(model, prompts, their mask, sampled responses, their mask, logits (B, T, V)): all of it made by transformers."""
    model, (prompt, mask) = build_model(request.param, vocab_size=30, seed=3), left_padded(PROMPTS, extra=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(input_ids=prompt, attention_mask=mask.long(), do_sample=True, temperature=.7, top_k=0,
                                top_p=1.0, num_return_sequences=4, max_new_tokens=8, eos_token_id=ENDS, pad_token_id=0,
                                output_logits=True, return_dict_in_generate=True)
    tokens = output.sequences[:, prompt.shape[1]:]
    real = lm.completion_mask(tokens, eos_ids=ENDS)
    assert len(set(real.sum(1).tolist())) > 2 and (tokens[~real] == 0).all()  # they end at several places
    return model, prompt, mask, tokens, real, torch.stack(output.logits, 1)


@pytest.mark.parametrize("engine", [lm.token_logprobs, fast.token_logprobs], ids=["plain", "fast"])
@pytest.mark.parametrize("temperature", [1.0, .7])
def test_log_probabilities_and_entropies_are_those_of_the_logits_that_transformers_sampled_from(
        sampled, engine, temperature):
    model, prompt, prompt_mask, tokens, mask, logits = sampled
    policy = torch.distributions.Categorical(logits=logits.double() / temperature)
    with torch.no_grad():
        logprobs, entropy = engine(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask, temperature=temperature)
    assert (logprobs - policy.log_prob(tokens).where(mask, 0.0)).abs().max() < 1e-4
    assert (entropy - policy.entropy().where(mask, 0.0)).abs().max() < 1e-4


@pytest.mark.parametrize("engine", [lm.token_logprobs, fast.token_logprobs], ids=["plain", "fast"])
def test_reinforce_with_advantage_1_is_transformers_own_loss(sampled, engine):
    """Imitation: the mean of −log π over the responses' tokens, and its gradient in every weight."""
    model, prompt, prompt_mask, tokens, mask, _ = sampled
    asked, seen = prompt.repeat_interleave(4, 0), prompt_mask.repeat_interleave(4, 0)
    words, seen = torch.cat([asked, tokens], 1), torch.cat([seen, mask], 1).long()
    labels = torch.cat([torch.full_like(asked, -100), tokens.where(mask, -100)], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)  # prompts are left-padded: generate does this itself, forward not
    logprobs, _ = engine(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask)
    mine, _ = lm.policy_loss(logprobs, logprobs.detach(), torch.ones(len(tokens)), mask, algorithm="reinforce")
    theirs = model(input_ids=words, attention_mask=seen, position_ids=positions, labels=labels).loss
    assert abs(mine - theirs) < 1e-5
    weights = dict(model.named_parameters())
    for name, one, other in zip(weights, *(torch.autograd.grad(loss, weights.values()) for loss in (mine, theirs))):
        assert (one - other).abs().max() < 1e-5 * max(1, other.abs().max()), name


def test_kl_old_is_torchs_divergence():
    """Ten samples in exactly the sampler's proportions: the mean of k3 is KL(π_old ‖ π_θ) itself, not an estimate."""
    counts = torch.tensor([1, 2, 3, 4])
    old = (counts.double() / 10).log()
    new = torch.log_softmax(torch.tensor([.5, -1.0, .3, .2], dtype=torch.float64), 0)
    token = torch.arange(4).repeat_interleave(counts)
    _, metrics = lm.policy_loss(new[token][:, None], old[token][:, None], torch.ones(10), torch.ones(10, 1),
                                algorithm="reinforce")
    divergence = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (old, new)))
    assert metrics["kl_old"].item() == pytest.approx(divergence.item(), abs=1e-12)
