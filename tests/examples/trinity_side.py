"""What test_with_trinity.py asks of Trinity-RFT's own code: prints one JSON object, the answer.

Usage: trinity_side.py FOLDER; FOLDER/<row>/trinity.yaml are the exported files.
"""

import contextlib
import importlib
import io
import json
import pathlib
import sys
import warnings
from types import SimpleNamespace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "examples"), str(HERE.parent.parent)]
warnings.simplefilter("ignore")

import without_ray  # noqa: F401 (Trinity imports Ray, and this asks for classes only)

lm = importlib.import_module("06_full_llm_training")
torch = lm.torch

from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
from trinity.common.config import load_config
from trinity.common import config_validator
from trinity.common.rewards import REWARD_FUNCTIONS

P, K, T = 3, 8, 6
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(1, T + 1, (P, K), generator=GENERATOR)
MASK = torch.arange(T) < LENGTHS.view(-1, 1)
REWARDS = torch.tensor([[1.0, 0, 0, 1, 0, 0, 0, 0], [0, 0.5, 1, 1, 1, 0, 1, 1], [0] * K])
LOGPROBS = torch.randn(P * K, T, generator=GENERATOR) - 2
OLD = LOGPROBS + torch.randn(P * K, T, generator=GENERATOR)  # ratios from .05 to 20: inside, between, beyond all bounds


def advantages_of(algorithm):
    """(B, T) advantages that Trinity's class makes of REWARDS, run for each group or on its batch of verl's."""
    function = ADVANTAGE_FN.get(algorithm.advantage_fn)(**algorithm.advantage_fn_args)
    if algorithm.advantage_fn == "rloo":
        tokens = torch.zeros(P * K, T)
        tokens[torch.arange(P * K), LENGTHS.flatten() - 1] = REWARDS.flatten()
        batch = SimpleNamespace(batch={"token_level_rewards": tokens, "response_mask": MASK},
                                non_tensor_batch={"uid": [i // K for i in range(P * K)]})
        return function(batch)[0].batch["advantages"]
    rows = []
    for group in range(P):
        torch.manual_seed(group)
        experiences = [SimpleNamespace(reward=reward, action_mask=mask.float()) for reward, mask
                       in zip(REWARDS[group].tolist(), MASK[group * K: (group + 1) * K])]
        rows += [e.advantages for e in function.calculate_group_advantage(group, experiences)[0]]
    return torch.stack(rows)


def gradient(loss_of):
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = loss_of(logprobs)
    loss.backward()
    return loss.item(), logprobs.grad


answer = {"rows": {}}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/trinity.yaml")):
    name, row = path.parent.name, lm.ALGORITHMS[path.parent.name]
    config = load_config(str(path))  # refuses a name or a type that is not Trinity's
    for part in ("Algorithm", "Synchronizer", "Interval"):  # what they fill in, and what they change
        getattr(config_validator, f"{part}ConfigValidator")().validate(config)
    algorithm = config.algorithm
    theirs = advantages_of(algorithm)
    ours = lm.shaped_advantages(REWARDS, LENGTHS, algorithm=lm.dataclasses.replace(row, shaping="none"))
    if row.shaping == "drop":  # who is dropped is drawn: counted here, then Trinity's draw is taken
        kept = (theirs != 0).view(P, K, T).any(-1).sum(1).tolist()
        ours = theirs.amax(1).where(theirs.amax(1) > 0, theirs.amin(1)).view(P, K)
    else:
        kept, made = None, ours.view(-1, 1) * MASK
    if row.shaping == "weight":  # Trinity weighs in its loss
        ours = lm.shaped_advantages(REWARDS, LENGTHS, algorithm=row)
    loss_class = POLICY_LOSS_FN.get(algorithm.policy_loss_fn)
    loss_function = loss_class(backend="verl", **algorithm.policy_loss_fn_args)
    with contextlib.redirect_stdout(io.StringIO()):
        (their_loss, their_gradient), (our_loss, our_gradient) = (gradient(f) for f in (
            lambda x, f=loss_function, a=theirs: f(logprob=x, old_logprob=OLD, action_mask=MASK, advantages=a)[0],
            lambda x, a=ours, row=row: lm.policy_loss(x, OLD, a.flatten(), MASK, algorithm=row)[0]))
    answer["rows"][name] = {
        "advantages": None if kept else (theirs - made).abs().max().item(), "kept": kept,
        "gradient": (their_gradient - our_gradient).abs().max().item(), "largest": our_gradient.abs().max().item(),
        "loss": our_loss - their_loss,
        "synchronizer": [config.synchronizer.sync_interval, config.synchronizer.sync_offset],
        "extra_terms": [algorithm.kl_loss_fn, algorithm.kl_penalty_fn, algorithm.entropy_loss_fn],
        "eval_interval": config.explorer.eval_interval, "model": config.model.model_path,
        "batch": [config.buffer.batch_size, algorithm.repeat_times, config.buffer.total_steps, algorithm.optimizer.lr]}
taskset = config.buffer.explorer_input
reward = REWARD_FUNCTIONS.get(taskset.default_reward_fn_type)(**taskset.taskset.reward_fn_args)
answer["reward"] = [reward(response=text, truth="46") for text in ("46", "The answer is 46.", "47")]
print(json.dumps(answer))
