"""What test_with_trl.py asks of TRL, run by a Python that has it: prints one JSON object, the answer.

Usage: trl_side.py QUESTION CACHE-DIR [FLAG …]
"""

import contextlib
import importlib
import io
import json
import pathlib
import sys
import tempfile
import warnings
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "examples"))
example = importlib.import_module("with_trl")
lm, torch = example.lm, example.torch

FLAGS = ["--device", "cpu", "--prompts-per-step", "4", "--steps", "2", "--max-grad-norm", "1e9",
         "--learning-rate", "1e-9"]


def trainer(*flags):
    return example.make_trainer(example.parse([*FLAGS, *flags]), tempfile.mkdtemp())[0]


def first_batch(of):
    """The first batch that this trainer would train on, in the order of its groups, and what shaped_advantages saw."""
    of.model.train()
    of.current_gradient_accumulation_steps, seen, shaped = 1, {}, lm.shaped_advantages
    torch.manual_seed(0)

    def spy(rewards, lengths, **options):
        seen.update(rewards=rewards, lengths=lengths)
        return shaped(rewards, lengths, **options)

    lm.shaped_advantages = spy
    batch = of._generate_and_score_completions(next(iter(of.get_train_dataloader())))
    lm.shaped_advantages = shaped
    return batch, seen


def stale(of, batch):
    """The batch with old log-probabilities that differ from the policy's by about one nat per token."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    with torch.no_grad():
        now, _, _ = of._get_per_token_logps_and_entropies(of.model, ids, mask, batch["completion_ids"].shape[1],
                                                          compute_entropy=True)
    noise = torch.randn(now.shape, generator=torch.Generator().manual_seed(1))
    return batch | {"old_per_token_logps": now + noise}


def gradient(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def loss_and_gradient(of, compute, batch):
    of.model.zero_grad()
    loss = compute(of.model, batch)
    loss.backward()
    return loss.item(), gradient(of.model)


def distance(one, other):
    return (one - other).abs().max().item()


def same_loss(*flags):
    """Row grpo and TRL's own loss, on one batch with TRL's advantages: fresh, and stale."""
    of = trainer("--algorithm", "grpo", *flags)
    batch, seen = first_batch(of)
    own = super(example.AnyRowTrainer, of)
    deviation = seen["rewards"] - seen["rewards"].mean(1, keepdim=True)
    of.shaped = {}  # now the same samples again, with what TRL itself makes of them
    torch.manual_seed(0)
    theirs = own._generate_and_score_completions(next(iter(of.get_train_dataloader())))
    answer = {"same_samples": bool((theirs["completion_ids"] == batch["completion_ids"]).all())}
    for name, advantages, ddof, eps in (("ours", batch["advantages"], 0, 1e-6), ("trl", theirs["advantages"], 1, 1e-4)):
        scale = seen["rewards"].std(1, correction=ddof, keepdim=True) + eps
        answer[f"{name}_advantages"] = distance(advantages.view(4, -1) * scale, deviation)
    batch["advantages"] = theirs["advantages"]
    for name, data in (("fresh", batch), ("stale", stale(of, batch))):
        (loss, mine), (trl_loss, trl) = (loss_and_gradient(of, compute, data)
                                         for compute in (of._compute_loss, own._compute_loss))
        answer[name] = {"loss": loss, "trl_loss": trl_loss, "gradient": distance(mine, trl),
                        "largest": trl.abs().max().item(), "clipped": of._metrics["train"]["clip_fraction"][-1]}
    return answer


# TRL's name of a loss, with its settings there → what it is here. Its "grpo" takes the paper's mean, over sequences.
# Its "sapo" and "vespo" have soft masks, which no choice of ours makes.
ROWS = lm.ALGORITHMS
LOSSES = {
    "grpo": ({}, lm.dataclasses.replace(ROWS["grpo"], aggregation="seq-mean-token-mean")),
    "bnpo": ({}, ROWS["grpo"]),
    "dapo": ({"epsilon_high": .28}, ROWS["dapo"]),
    "dr_grpo": ({}, ROWS["dr-grpo"]),
    "cispo": ({"epsilon_high": 1.2}, ROWS["cispo"]),  # here it is the cap itself
    "grpo, sequence": ({"epsilon_low": .03, "epsilon_high": .04},
                       lm.find_algorithm("gspo", eps_low=.03, eps_high=.04)),
    "luspo, sequence": ({"epsilon_low": .03, "epsilon_high": .04}, lm.find_algorithm(
        lm.dataclasses.replace(ROWS["gspo"], aggregation="seq-mean-token-sum"), eps_low=.03, eps_high=.04)),
}


def loss_types(*flags):
    """Each of these losses as a function of log-probabilities, in float64: TRL's value and slope, and ours.

    TRL's value is −ρA and where it clips −(1 ± ε)A; ours is −ρA·log π, which with_trl.py shifts to log π = 1, and 0
    where it clips. constant: what that makes of the clipped tokens, counted here by the inequalities of PPO.
    """
    answer, of = {}, trainer("--algorithm", "grpo", *flags)
    own, random = super(example.AnyRowTrainer, of), torch.Generator().manual_seed(0)
    old = -3 * torch.rand(12, 8, generator=random, dtype=torch.float64)
    new = old + .4 * torch.randn(12, 8, generator=random, dtype=torch.float64)
    mask = torch.arange(8) < torch.randint(1, 9, (12, 1), generator=random)
    batch = {name: torch.zeros(12, 8).long() for name in ("prompt_ids", "prompt_mask", "completion_ids")}
    batch |= {"completion_mask": mask.long(), "old_per_token_logps": old, "num_items_in_batch": mask.sum(),
              "advantages": torch.randn(12, generator=random, dtype=torch.float64)}
    of.model.train()
    of.current_gradient_accumulation_steps, of.max_completion_length = 1, 8

    def value_and_slope(compute):
        leaf = new.clone().requires_grad_()
        of._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
        value = compute(leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0]

    def ours(row):
        def compute(leaf):
            shift = 0 if row.weight_cap < lm.math.inf else 1 - leaf.detach()  # TRL's CISPO has −ρA·log π, as we do
            return lm.policy_loss(leaf + shift, old + shift, batch["advantages"], mask, algorithm=row, constant=8)[0]
        return compute

    for name, (settings, row) in LOSSES.items():
        of.loss_type, _, level = name.partition(", ")
        of.importance_sampling_level = level or "token"
        of.epsilon_low, of.epsilon_high = settings.get("epsilon_low", .2), settings.get("epsilon_high", .2)
        a = batch["advantages"][:, None]
        ratio = (new - old).exp()
        if level:
            ratio = (((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().expand(mask.shape)
        bound = torch.where(a > 0, torch.full_like(a, 1 + of.epsilon_high), 1 - of.epsilon_low)
        clipped = (torch.where(a > 0, ratio > bound, ratio < bound) & (of.loss_type != "cispo")).double()
        real = mask.double()
        share = {"dr_grpo": 1 / (12 * 8), "luspo": 1 / 12, "grpo": 1 / (12 * real.sum(1, keepdim=True))}
        constant = (share.get(of.loss_type, 1 / real.sum()) * real * clipped * -bound * a).sum()
        value, slope = value_and_slope(lambda _: own._compute_loss(of.model, batch))
        my_value, my_slope = value_and_slope(ours(row))
        answer[name] = {"values": abs(value - my_value - constant.item()), "value": abs(value),
                        "gradient": distance(slope, my_slope), "largest": slope.abs().max().item(),
                        "clipped": (clipped[mask].sum() / mask.sum()).item()}

    # Two-sided clipping with an upper bound of 1 + ε for all: where A < 0 our two sides, where A > 0 our one side.
    of.loss_type, of.importance_sampling_level, of.args.delta = "bnpo", "token", 1.2
    of.epsilon_low = of.epsilon_high = .2
    _, found = value_and_slope(lambda _: own._compute_loss(of.model, batch))
    _, one = value_and_slope(ours(ROWS["rec-oneside-is"]))
    _, two = value_and_slope(ours(ROWS["rec-twoside-is"]))
    answer["delta"] = {"gradient": distance(found, torch.where(a > 0, one, two)), "largest": found.abs().max().item(),
                       "from two_side": distance(found, two), "from one_side": distance(found, one)}

    # The KL term alone: TRL's k3 of (policy, reference) is our kl_old of (sampler, policy).
    of.args.delta, of.beta = None, 1.0
    alone = batch | {"advantages": torch.zeros(12, dtype=torch.float64), "old_per_token_logps": new,
                     "ref_per_token_logps": 2 * new - old}
    value, _ = value_and_slope(lambda _: own._compute_loss(of.model, alone))
    kl = lm.policy_loss(2 * new - old, new, alone["advantages"], mask, algorithm="grpo")[1]["kl_old"]
    answer["kl"] = {"values": abs(value - kl.item()), "value": value}
    return answer


def every_row(*flags):
    """name → the distance of the gradient in TRL from 06's own train_step on the same stale batch, and its size."""
    answer, of = {}, trainer("--algorithm", "reinforce", *flags)
    of.reward_funcs = [lambda completions, **_: [0.0] * 8 + [1.0] * 8 + [float(i % 3 == 0) for i in range(16)]]
    for name, row in lm.ALGORITHMS.items():  # a group all wrong, one all right, and two others
        if row.worked_examples or row.entropy_target:  # refused; and a second batch, sampled anew
            continue
        of.row, of.config = row, lm.dataclasses.replace(of.config, algorithm=name)
        of.dropping.manual_seed(0)
        batch, seen = first_batch(of)
        batch = stale(of, batch)
        _, mine = loss_and_gradient(of, of._compute_loss, batch)
        group_size, mask = seen["rewards"].shape[1], batch["completion_mask"].bool()
        rollout = lm.Rollout(batch["prompt_ids"][::group_size], batch["prompt_mask"][::group_size].bool(),
                             batch["completion_ids"], mask, batch["old_per_token_logps"] * mask, seen["rewards"],
                             torch.zeros(len(mask), dtype=torch.bool), 0, [])
        optimizer = SimpleNamespace(zero_grad=of.model.zero_grad, step=lambda: None)
        config = lm.dataclasses.replace(of.config, engine="plain")
        lm.train_step(of.model, optimizer, rollout, config, algorithm=row,
                      generator=torch.Generator().manual_seed(0))
        answer[name] = {"distance": distance(mine, gradient(of.model)), "largest": mine.abs().max().item()}
    return answer


def micro_batches(*flags):
    """The gradient of two halves of a batch, as gradient accumulation adds them up, against the whole batch's."""
    answer, of = {}, trainer("--algorithm", "reinforce", *flags)
    for name in ("grpo", "rec-gspo-is", "dr-grpo", "topr"):  # one for each N
        of.row = lm.ALGORITHMS[name]
        batch, _ = first_batch(of)
        batch = stale(of, batch)
        _, whole = loss_and_gradient(of, of._compute_loss, batch)
        of.current_gradient_accumulation_steps = of.args.steps_per_generation = 2
        of.model.zero_grad()
        for half in (slice(0, 16), slice(16, None)):
            of._compute_loss(of.model, {k: v if v.dim() == 0 else v[half] for k, v in batch.items()}).backward()
        answer[name] = {"distance": distance(whole, gradient(of.model)), "largest": whole.abs().max().item()}
        of.args.steps_per_generation = 1
    return answer


def train(*flags):
    """Train as the command line would: accuracy before and after, and the reward of each logged step."""
    config = example.parse(["--device", "cpu", *flags])
    of, model, tokenizer, task = example.make_trainer(config, tempfile.mkdtemp())

    def accuracy():
        return example.evaluation.evaluate(lm.collect, model, tokenizer, task, config)["eval_accuracy"]

    before = accuracy()
    of.train()
    return {"before": before, "after": accuracy(), "steps": of.state.global_step,
            "log": [{k: float(v) for k, v in line.items()} for line in of.state.log_history]}


if __name__ == "__main__":
    question, cache, *flags = sys.argv[1:]
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        answer = globals()[question]("--cache-dir", cache, *flags)
    print(json.dumps(answer))
