"""A guided tour of 06_full_llm_training.py: the whole algorithm, piece by piece, then two small runs.

06 is a page of code to read from top to bottom. Here its pieces are called one at a time, on inputs so small that each
number can be checked with a pencil. At the end a transformer of 0.4 million parameters learns two-digit addition from
data that are up to 19 updates old, with and without clipping.

You need  lessons 02 to 05, or the README's table of rows. Two minutes the first time, when the small model is made.
"""
# %%
import contextlib
import importlib
import io
import json
import pathlib
import tempfile

import torch

from utils import figure, method_style

lm = importlib.import_module("06_full_llm_training")

# %% [markdown]
# ## 1. A row is a choice of five things
# Every algorithm of the family is one row of one equation: which advantage A, which mask M, which weight W, which
# regulariser R, and which mean N over the tokens.
#
#     L(θ) = −Σ_i Σ_t N_i·M_i·W_i·A_i·log π_θ(y_t) + R(θ)
#
# In the code a row is a frozen dataclass, and what a row leaves alone is REINFORCE with the group mean as baseline.

# %%
for name in ("reinforce", "grpo", "rec-oneside-nois", "rec-ring-nois", "rep-opmd", "red-weight", "dapo"):
    row, plain = lm.ALGORITHMS[name], lm.Algorithm()
    changed = {field: value for field, value in vars(row).items() if value != getattr(plain, field)}
    print(f"{name:18}", {field: value for field, value in changed.items() if field != "source"})
print(len(lm.ALGORITHMS), "rows in all")

# %% [markdown]
# ## 2. The loss, token by token
# `policy_loss` takes log-probabilities, advantages and a mask: no model, no tokenizer. Its gradient says what happens
# to a token: −∂L/∂log π = N·M·W·A. Four tokens of right answers (A = 1) and four of wrong ones (A = −1), at ρ = .5,
# 1, 1.5 and 3.5. Positive is pushed up, negative pushed down, 0 is left alone. (N = 1/8 is divided out.)

# %%
ratio = torch.tensor([[0.5], [1.0], [1.5], [3.5]] * 2)
advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
pushes = {}
for name in ("reinforce", "rec-oneside-nois", "rec-oneside-is", "rec-twoside-nois", "rec-ring-nois"):
    logprobs = ratio.log().requires_grad_()
    loss, metrics = lm.policy_loss(logprobs, torch.zeros(8, 1), advantages, torch.ones(8, 1), algorithm=name)
    loss.backward()
    pushes[name] = (-8 * logprobs.grad[:, 0] + 0.0).tolist()  # + 0.0: no −0
    shown = " ".join(f"{push:5.1f}" for push in pushes[name])
    print(f"{name:18} A = 1 and −1, ρ = .5, 1, 1.5, 3.5: {shown}   clipped: {metrics['clip_fraction']:.3f}")
assert pushes["rec-oneside-nois"] == [1, 1, 0, 0, 0, -1, -1, -1]  # the table in section 1 of lesson 04

# %% [markdown]
# The last column of numbers is the whole difference between the clips: a wrong answer's token at ρ = 3.5 is far out
# and pushed back. One-side and ring let it, two-side does not.

# %%
fig, axis = figure(height=2.8, width=6.5)
for place, (name, push) in enumerate(pushes.items()):
    axis.bar(torch.arange(8) + 0.15 * place, push, width=0.14, color=method_style(name)["color"], label=name)
axis.set_xticks(torch.arange(8) + 0.3, [f"A={a}\nρ={r}" for a in ("1", "−1") for r in (".5", "1", "1.5", "3.5")])
axis.set(title="Where the clips differ: tokens far from their sampler", ylabel="push on log π", ylim=(-4, 1.5))
axis.legend(loc="lower left", fontsize=8)
fig.show()

# %% [markdown]
# ## 3. Sample, and ask again
# `generate` samples K responses to each prompt and records log π_old, the sampler's own log-probabilities, while it
# samples. `token_logprobs` asks the policy for the probability of given tokens. As long as the sampler is the policy,
# the two agree, and every ratio is 1: nothing to clip, nothing to weigh.

# %%
config = lm.Config(eval_questions=64, eval_samples=2)
quiet = io.StringIO()
with contextlib.redirect_stderr(quiet):  # progress bars
    model, tokenizer = lm.load_model("tiny", device=torch.device("cpu"), cache_dir=config.cache_dir, task="addition")
task = lm.load_task(config)
example = task.train[0]
prompt, prompt_mask = lm.encode_prompts(tokenizer, [example], device=model.device)
tokens, mask, old_logprobs = lm.generate(
    model, prompt, prompt_mask, group_size=8, max_new_tokens=8, temperature=1.0, pad_id=tokenizer.pad_token_id,
    eos_ids=lm.stop_ids(model, tokenizer), generator=torch.Generator().manual_seed(0))
answers = lm.decode(tokenizer, tokens, mask)
rewards = torch.tensor([[float(lm.is_correct(text, example.answer)) for text in answers]])
print(example.question, "→", answers, "  right:", example.answer)
print("rewards   ", rewards[0].tolist())
print("advantages", lm.group_advantages(rewards)[0].tolist())
with torch.no_grad():
    logprobs, entropy = lm.token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask)
gap = (logprobs - old_logprobs).abs().max()
print(f"largest |log ρ| of {int(mask.sum())} tokens: {gap:.1e}")
assert gap < 1e-4

# %% [markdown]
# ## 4. How stale is a batch?
# The sampler gets new weights every I steps and works m batches ahead. The batch of step n comes from the policy
# after v updates, so it is s updates old:
#
#     v(n) = I·max(0, ⌊(n − m − 1)/I⌋),      s(n) = (n − 1) − v(n)

# %%
for interval, offset in ((1, 0), (4, 0), (1, 3), (4, 2), (None, 0)):
    ages = [lm.staleness(n, sync_interval=interval, sync_offset=offset) for n in range(1, 13)]
    print(f"I = {interval!s:4} m = {offset}:  {ages}")

# %% [markdown]
# ## 5. Two small runs
# Forty steps of 32 prompts with 8 responses each, the sampler refreshed every 20 steps, two rows from one base. These
# are the calls that `--compare` makes. Forty steps of one seed are a demonstration, not a measurement: the front page
# has the longer runs, RESULTS the verdicts.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
histories = {}
with contextlib.redirect_stderr(quiet):
    for name in ("reinforce", "rec-oneside-nois"):
        run = lm.Config(algorithm=name, sync_interval=20, steps=40, eval_every=20, eval_questions=128, eval_samples=2,
                        save_every=40, out=str(folder / name), cache_dir=config.cache_dir)
        with contextlib.redirect_stdout(quiet):
            result = lm.train(run)
        lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        histories[name] = [json.loads(line) for line in lines]
        print(f"{name:18} accuracy {result['before']:.3f} → {result['after']:.3f}")

# %%
fig, axes = figure(3, width=3.5, height=3)
for axis, (key, title) in zip(axes, {"reward": "reward of the batch", "kl_old": "KL from the sampler, per token",
                                     "clip_fraction": "share of tokens clipped"}.items()):
    for name, history in histories.items():
        points = [(line["step"], line[key]) for line in history if key in line]
        axis.plot(*zip(*points), label=name, **method_style(name))
    axis.set(title=title, xlabel="step")
axes[0].legend()
fig.show()

# %% [markdown]
# The KL saws: it grows while the sampler is old and falls to 0 when it is refreshed, at step 21. The clip keeps it
# small.
#
# ## 6. What a run leaves behind
# Each line of `metrics.jsonl` is a step, and `samples.jsonl` shows what the model said.

# %%
for line in (folder / "rec-oneside-nois" / "samples.jsonl").read_text(encoding="utf-8").splitlines()[-3:]:
    print(line)
last = histories["rec-oneside-nois"][-1]
for key in ("staleness", "ratio_p05", "ratio_p95", "ess", "clip_fraction", "entropy", "flat_groups"):
    print(f"{key:14} {last[key]:.3f}")
