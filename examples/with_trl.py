#!/usr/bin/env python3
"""TRL's GRPOTrainer with the loss and the advantages of any row of ALGORITHMS, on data as stale as TRL can make it.

TRL keeps what it is good at: data sets, chat templates, vLLM, accelerate, PEFT, logging. Two things come from here:
`shaped_advantages` in place of its advantages, `policy_loss` in place of its loss, both functions of tensors in 06.
`AnyRowTrainer` is all there is to copy.

    --sync-interval I     is TRL's steps_per_generation: one sampler makes I batches, then I steps train on them
    --num-iterations n    is TRL's own: n updates on each batch

Run:  python examples/with_trl.py --algorithm rec-oneside-nois           (needs TRL: `pip install trl`, or
      python examples/with_trl.py --algorithm reinforce --num-iterations 8     `make .venv-bench/ready` and its python)
It takes 06's flags and trains the built-in model on 2-digit additions: a minute or two on 2 cores. Other models and
tasks work as they do in 06. You see TRL's metrics, then accuracy before → after.

What is more than a loss: TRL never replaces flat groups, so dapo keeps them, with advantage 0. And it gives one prompt
to all responses of a group, so icpo, which shows a worked example to one of them, is refused.
"""

import functools
import importlib
import json
import os
import pathlib
import sys
import tempfile
from dataclasses import dataclass, replace
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
lm = importlib.import_module("06_full_llm_training")  # before torch: it says how waiting threads wait

import torch

from under_the_hood import evaluation, fast, friends, options
from under_the_hood.errors import UserError, require
from under_the_hood.runs import METRICS
from under_the_hood.tasks import Example, batch_examples, reward_function

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError:
    sys.exit("error: this needs TRL: pip install trl, or `make .venv-bench/ready` and .venv-bench/bin/python")


class AnyRowTrainer(GRPOTrainer):
    """GRPOTrainer that takes A from shaped_advantages and the loss from policy_loss. config: 06's; it names the row."""

    def __init__(self, *args, config, **kwargs):
        super().__init__(*args, **kwargs)
        self.config, self.row = config, lm.chosen_algorithm(config)
        self.dropping, self.sampling = (torch.Generator(device).manual_seed(config.seed)
                                        for device in ("cpu", self.accelerator.device))

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        """What TRL's reward functions say, for TRL; and A of the row, made from it, for _compute_loss."""
        scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids)  # (B, functions)
        rewards = torch.where(scores.isnan().all(1), torch.nan, (scores * self.reward_weights.to(scores)).nansum(1))
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        mine = slice(len(prompts) * self.accelerator.process_index, len(prompts) * (self.accelerator.process_index + 1))
        lengths = torch.tensor([len(ids) for ids in completion_ids], device=scores.device)
        rewards = friends.training_rewards(
            rewards[mine].view(-1, group_size), [Example(str(x["prompt"]), str(x.get("answer"))) for x in inputs],
            [text_of(completion) for completion in completions], lengths, self.config, algorithm=self.row,
            generator=self.sampling)
        rewards, lengths = (self.accelerator.gather(part.flatten()).view(-1, group_size) for part in (rewards, lengths))
        advantages = lm.shaped_advantages(rewards, lengths, algorithm=self.row, generator=self.dropping,
                                          noise_rates=friends.noise_rates(self.config))
        flat = ~friends.informative_groups(friends.filled(rewards))[:, None]
        outcome = torch.where(flat, torch.where(rewards > 0, 1.0, -1.0), advantages.sign())
        outcome = outcome.where(~rewards.isnan(), 0.0)  # TRL shuffles: each response carries its own
        self.shaped = {"advantages": advantages.flatten()[mine], "outcome": outcome.flatten()[mine]}
        return scores

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(inputs) | self.shaped

    def _compute_loss(self, model, inputs):
        prompt, mask, training = inputs["prompt_ids"], inputs["completion_mask"].bool(), self.model.training
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(
            model, torch.cat([prompt, inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], mask.long()], 1), mask.shape[1], compute_entropy=True)
        old_logprobs = inputs.get("old_per_token_logps", logprobs.detach())  # none: sampled by the policy itself
        outcome = inputs["outcome"][:, None]
        advantages = friends.token_advantages(inputs["advantages"][:, None], outcome, logprobs - old_logprobs,
                                              entropy.detach(), mask, algorithm=self.row).view(len(mask), -1)
        # N of a whole optimizer step: TRL adds up its micro-batches, and takes the mean over the processes.
        parts = self.current_gradient_accumulation_steps if training else 1
        share = parts / self.args.steps_per_generation / self.accelerator.num_processes
        weights = lm.token_weights(mask, aggregation=self.row.aggregation, sequences=len(mask) * parts,
                                   tokens=inputs["num_items_in_batch"] * share if training else None,
                                   constant=self.max_completion_length)
        shift = 1 - logprobs.detach()  # changes no ratio and no gradient: the value is −ρA, as in TRL, not −ρA·log π
        loss, metrics = lm.policy_loss(logprobs + shift, old_logprobs + shift, advantages * outcome.abs(), mask,
                                       algorithm=self.row, weights=weights)
        metrics["entropy"] = (entropy.detach() * mask).sum() / mask.sum()
        for name, value in metrics.items():
            self._metrics["train" if training else "eval"][name].append(self.accelerator.gather(value).mean().item())
        second = functools.partial(fast.generate, max_new_tokens=self.max_completion_length, generator=self.sampling,
                                   eos_ids=set(self.eos_token_ids), pad_id=self._tokenizer.pad_token_id)
        batch = SimpleNamespace(prompt=prompt, prompt_mask=inputs["prompt_mask"].bool(), tokens=prompt)
        return loss + friends.extra_gradient(  # AEPO's second batch; 0 for all other rows
            model, batch, replace(self.config, group_size=1), algorithm=self.row, entropy=metrics["entropy"],
            sample=second, token_logprobs=fast.token_logprobs)


def text_of(completion) -> str:
    """TRL's completion: a text, or for a chat model a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


@dataclass(kw_only=True)
class TrlOptions:
    _argument_group_name = "TRL"
    num_iterations: int = options.option(1, "updates on each batch: TRL's reuse of its generations")
    trl_loss: bool = options.option(False, "train with TRL's own GRPO loss and advantages, to compare")


@dataclass(kw_only=True)
class Config(lm.Config, TrlOptions):
    """06's flags, and TRL's."""


def trl_config(config, folder: str) -> GRPOConfig:
    """What 06's flags are in TRL's words. A step is one pass; where memory is short, take less for
    per_device_train_batch_size and more gradient_accumulation_steps, and steps_per_generation as many times more."""
    return GRPOConfig(
        output_dir=folder, max_steps=config.steps, seed=config.seed, use_cpu=config.device == "cpu", bf16=False,
        per_device_train_batch_size=config.prompts_per_step * config.group_size, gradient_accumulation_steps=1,
        steps_per_generation=config.sync_interval, num_iterations=config.num_iterations,
        num_generations=config.group_size, max_completion_length=config.max_new_tokens, shuffle_dataset=False,
        temperature=config.temperature, top_k=0, top_p=1.0, repetition_penalty=1.0,  # else another policy samples
        beta=0.0, epsilon=0.2, loss_type="dapo", scale_rewards="group",  # --trl-loss: GRPO with a token mean, no KL
        chat_template_kwargs=json.loads(config.chat_template_kwargs),
        optim="adamw_torch_fused", learning_rate=config.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=config.max_grad_norm, gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=config.eval_every, logging_strategy="steps", save_strategy="no", report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False)


def make_trainer(config, folder: str):
    """(trainer, model, tokenizer, task), on the questions that 06 would ask, in its order."""
    from datasets import Dataset

    task = lm.load_task(config)
    model, tokenizer = lm.load_model(config.model, device=lm.pick_device(config.device), cache_dir=config.cache_dir,
                                     task=config.task)
    lm.set_chat_options(tokenizer, config)
    task = lm.drop_long_prompts(task, model, tokenizer, config)
    reward = reward_function(config.reward, config.task, config.on_unscored)

    def rewards(completions, question, answer, **_):
        return [reward(q, text_of(c), a) for q, c, a in zip(question, completions, answer)]

    def prompt(example):
        if not tokenizer.chat_template:
            return example.terse or f"Question: {example.question}\nAnswer:"
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        return [*system, {"role": "user", "content": example.question}]

    batches = -(-config.steps // (config.sync_interval * config.num_iterations)) * config.sync_interval
    asked = [e for n in range(1, batches + 1)
             for e in batch_examples(task.train, n, count=config.prompts_per_step, seed=config.seed)]
    data = Dataset.from_list([{"prompt": prompt(e), "question": e.question, "answer": e.answer} for e in asked])
    trainer_class = GRPOTrainer if config.trl_loss else functools.partial(AnyRowTrainer, config=config)
    trainer = trainer_class(model=model, processing_class=tokenizer, reward_funcs=rewards, train_dataset=data,
                            args=trl_config(config, folder))
    return trainer, model, tokenizer, task


def parse(argv=None) -> Config:
    config = options.parse_arguments(Config, (*lm.GROUPS, TrlOptions), __doc__, METRICS, argv)
    options.validate(config, lm.ALGORITHMS, lm.try_loss)
    require(config.num_iterations >= 1, f"--num-iterations is {config.num_iterations}; it must be at least 1")
    require(not (config.sync_offset or config.offline),
            "TRL samples and trains in turn: --sync-offset and --offline have no counterpart. Its stale data come from "
            "--sync-interval and --num-iterations")
    require(not lm.ALGORITHMS[config.algorithm].worked_examples,
            f"{config.algorithm} shows one response of a group a worked example, and TRL gives all of them one prompt")
    return config


def main(argv=None) -> None:
    try:
        config = parse(argv)
        with tempfile.TemporaryDirectory() as scratch:
            trainer, model, tokenizer, task = make_trainer(config, config.out or scratch)
            before = evaluation.evaluate(lm.collect, model, tokenizer, task, config)["eval_accuracy"]
            trainer.train()
            if config.out:
                trainer.save_model(config.out)
        after = evaluation.evaluate(lm.collect, model, tokenizer, task, config)["eval_accuracy"]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"TRL, {'its own loss' if config.trl_loss else config.algorithm}: accuracy {before:.3f} → {after:.3f}")


if __name__ == "__main__":
    main()
