"""Two processes train the same model as one does: joined batches, equal gradients, streams of their own, a resumed run.

The processes are real, over gloo. What two of them find is compared with one process on the joined batch.
"""

import copy
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys

import processes
import pytest
import torch
from conftest import ROOT, build_digit_tokenizer, build_model

from under_the_hood import evaluation, fast, parallel, runs
from under_the_hood.batching import split_batch
from under_the_hood.friends import training_batch
from under_the_hood.models import load_model
from under_the_hood.runs import load_checkpoint
from under_the_hood.tasks import Example, Task, batch_examples, load_task

lm = importlib.import_module("06_full_llm_training")

P, K, L, T, V = 4, 4, 3, 6, 40  # prompts of the whole batch, responses to each, and the widths
ROWS = ("grpo", "gmpo", "dr-grpo", "reinforce-plus-plus", "red-drop", "rep-opmd", "ep-grpo", "icpo", "aepo")
CLIPPED = {"max_grad_norm": 0.05}  # below the norms of this batch
BUDGET = 40  # tokens in a pass: one long group, or two short ones, also with a prompt for each response


def joined_batch() -> lm.Rollout:
    """Prompts 0 and 1 have short responses, 2 and 3 long ones (C56): the second process needs twice as many passes."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.cat([torch.randint(low, high, (2 * K,), generator=generator) for low, high in ((1, 3), (4, T + 1))])
    mask = torch.arange(T) < lengths[:, None]
    tokens = torch.randint(3, V, (P * K, T), generator=generator).masked_fill(~mask, 0)
    old = (-torch.rand(P * K, T, generator=generator) * 4).masked_fill(~mask, 0)
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0]])
    prompt = torch.randint(3, V, (P, L), generator=generator)
    return lm.Rollout(prompt, prompt > -1, tokens, mask, old, rewards, mask.all(1), 0, [],
                      hinted=torch.arange(P * K) % K == K - 1)


def share(batch, rank: int, size: int):
    """The part of a batch that one process holds."""
    rows = slice(rank * P * K // size, (rank + 1) * P * K // size)
    part = slice(rank * P // size, (rank + 1) * P // size)
    return lm.Rollout(batch.prompt[part], batch.prompt_mask[part], batch.tokens[rows], batch.mask[rows],
                      batch.old_logprobs[rows], batch.rewards[part], batch.truncated[rows], 0, [],
                      hinted=batch.hinted[rows])


@functools.wraps(fast.token_logprobs)
def logprobs_in_small_chunks(*arguments, **options):
    return fast.token_logprobs(*arguments, chunk_size=3, **options)


def one_step(row: str, batch, *, shard: bool = False, method=fast.token_logprobs, **flags):
    """(metrics, gradients, weights) of one training step from a fixed model."""
    model = build_model("qwen2", vocab_size=V)
    if shard:
        parallel.shard(model, method)
    flags = {"max_grad_norm": 1e9, **flags}
    config = lm.Config(algorithm=row, prompts_per_step=P, group_size=K, max_new_tokens=T, micro_batch_tokens=BUDGET,
                       **flags)
    if row != "icpo":
        batch = dataclasses.replace(batch, hinted=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def sample(model, prompt, prompt_mask, **options):  # AEPO's second batch: the same for one process as for two
        tokens = batch.tokens.flip(1).masked_fill(~batch.mask, 7)
        return tokens, batch.mask, None

    metrics = lm.train_step(model, optimizer, batch, config, algorithm=lm.find_algorithm(row), sample=sample,
                            generator=torch.Generator().manual_seed(1))
    whole = {name: parallel.whole(p.grad).clone() for name, p in model.named_parameters()}
    return metrics, whole, {name: parallel.whole(p.detach()).clone() for name, p in model.named_parameters()}


def optimizer_state(*, shard: bool) -> dict:
    """AdamW's state after one step on the sum of all weights."""
    model = build_model("qwen2", vocab_size=V)
    if shard:
        parallel.shard(model, fast.token_logprobs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (i + 1)
    optimizer.step()
    return parallel.optimizer_state(optimizer)


def lend_the_sampler():
    """Does a sampler hold the sharded policy's weights inside policy_to_sample, and its own again behind it?"""
    model, sampler = build_model("qwen2", vocab_size=V, seed=1), build_model("qwen2", vocab_size=V)
    policys, own = ({name: weight.clone() for name, weight in m.state_dict().items()} for m in (model, sampler))
    parallel.shard(model, fast.token_logprobs)
    with parallel.policy_to_sample(model, sampler) as policy:
        lent = policy is sampler and all(torch.equal(w, policys[name]) for name, w in sampler.state_dict().items())
    return lent, all(torch.equal(weight, own[name]) for name, weight in sampler.state_dict().items())


def questions(model, tokenizer, task, config, generator):
    """The first batch of a run, this process's share."""
    algorithm = lm.find_algorithm(config.algorithm)
    sample = functools.partial(lm.collect, model, tokenizer, config=config, version=0, generator=generator,
                               algorithm=algorithm)
    return training_batch(sample, task, 1, config, algorithm=algorithm)


def process(folder) -> None:
    """What each of the two processes does."""
    parallel.start(torch.device("cpu"))
    rank, found = parallel.rank(), {}
    found["gather"] = parallel.gather(torch.full((2 * rank + 1, 2), float(rank)))
    found["gather nothing"] = parallel.gather(torch.ones(rank, 3))
    found["sum"] = parallel.all_reduce_sum(torch.tensor([1.0, rank]))
    found["largest"] = parallel.largest(3 - rank)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 3, 4, 1)]
    for i, parameter in enumerate(parameters[:3]):
        parameter.grad = torch.full_like(parameter, 10.0**i * (rank + 1))
    parallel.add_gradients(parameters, bucket=7)
    found["add_gradients"] = [p.grad for p in parameters]

    for row in ROWS:
        found[row] = one_step(row, share(joined_batch(), rank, 2))
        if row != "aepo":
            found[f"{row}, sharded"] = one_step(row, share(joined_batch(), rank, 2), shard=True)
    for shard in (False, True):
        found[f"clipped {shard}"] = one_step("grpo", share(joined_batch(), rank, 2), shard=shard,
                                             method=logprobs_in_small_chunks, **CLIPPED)
    found["optimizer"] = optimizer_state(shard=True)
    found["lent"], found["given back"] = lend_the_sampler()

    tokenizer = build_digit_tokenizer()
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0)
    task = Task("t", [Example(f"{i:b}", "1", f"{i:b}") for i in range(8)], [])
    for row in ("dapo", "icpo"):  # each process refills, or hints, for itself, as often as its own groups need it
        config = lm.Config(algorithm=row, prompts_per_step=P, group_size=K, max_new_tokens=T, refills=2)
        trained, drawn = copy.deepcopy(model), torch.Generator().manual_seed(parallel.own_seed(0))
        batch = questions(trained, tokenizer, task, config, drawn)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        metrics = lm.train_step(trained, optimizer, batch, config, algorithm=lm.find_algorithm(row), generator=None)
        found[f"{row}, sampled"] = metrics, batch.rewards, trained.state_dict()
    config = lm.Config(algorithm="grpo", prompts_per_step=P, group_size=K, max_new_tokens=T)
    sampling = torch.Generator().manual_seed(parallel.own_seed(0))
    batch = questions(model, tokenizer, task, config, sampling)
    found["questions"] = [sample["question"] for sample in batch.samples]
    fresh = torch.Generator().manual_seed(parallel.own_seed(0))  # else the batch before has already parted the streams
    prompt = torch.full((1, L), 3)  # the same in both processes
    same = fast.generate(model, prompt, prompt > 0, group_size=8, max_new_tokens=12, temperature=1.0, eos_ids={1},
                         pad_id=0, generator=fresh)
    found["completions"] = same[0]
    torch.save(found, folder / f"rank{rank}.pt")
    parallel.stop()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for status, output in processes.call_together(process, folder, folder=folder):
        assert status == 0, output
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("copies", [1, K], ids=["replicas", "shards"])
def test_the_processes_need_one_pass_and_two(copies):
    """Else the comparisons below would prove less: sharded processes must wait for each other."""
    lengths = joined_batch().mask.sum(1).view(P, K)
    for part, passes in ((lengths[:2], 1), (lengths[2:], 2)):
        assert len(list(split_batch(part, L * copies, torch.ones(2), budget=BUDGET))) == passes


def test_the_small_tools(found):
    for rank in found:
        assert rank["gather"].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]  # 1 row of rank 0, 3 of rank 1
        assert rank["gather nothing"].tolist() == [[1, 1, 1]]
        assert rank["sum"].tolist() == [2, 1] and rank["largest"] == 3
        first, second, third, none = rank["add_gradients"]
        assert first.tolist() == [3] * 5 and second.tolist() == [30] * 3 and third.tolist() == [300] * 4
        assert none is None


@functools.cache
def alone(row: str):
    return one_step(row, joined_batch())


@pytest.mark.parametrize("row, way", [(row, way) for row in ROWS for way in ("", ", sharded")
                                      if (row, way) != ("aepo", ", sharded")])  # which samples from the policy: refused
def test_two_processes_are_one_on_the_joined_batch(found, row, way):
    """C14, C56: loss, gradient and metrics, though the processes' responses differ in length and in the number of
    passes; and both processes end with the same weights, bit by bit."""
    metrics, gradients, _ = alone(row)
    for rank in found:
        two_metrics, two_gradients, two_weights = rank[f"{row}{way}"]
        assert two_metrics == pytest.approx(metrics, rel=2e-4, abs=2e-5)
        for name in gradients:
            assert torch.allclose(two_gradients[name], gradients[name], atol=2e-5, rtol=1e-3), name
            assert torch.equal(two_weights[name], found[0][f"{row}{way}"][2][name])
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients.values())


@pytest.mark.parametrize("shard", [False, True])
def test_the_whole_gradients_norm_is_clipped(found, shard):
    """Not that of a process's own gradients or shards; here the head runs in chunks, too."""
    metrics, gradients, _ = one_step("grpo", joined_batch(), **CLIPPED)
    assert metrics["grad_norm"] > 2 * CLIPPED["max_grad_norm"]
    for rank in found:
        two_metrics, two_gradients, _ = rank[f"clipped {shard}"]
        assert two_metrics == pytest.approx(metrics, rel=2e-4, abs=2e-5)
        norm = torch.cat([gradient.flatten() for gradient in two_gradients.values()]).norm().item()
        assert norm == pytest.approx(CLIPPED["max_grad_norm"], rel=1e-3)
        for name in gradients:
            assert torch.allclose(two_gradients[name], gradients[name], atol=1e-6, rtol=1e-3), name


def test_only_rank_0_holds_the_whole_optimizer_state(found):
    expected = optimizer_state(shard=False)["state"]
    first, second = (rank["optimizer"]["state"] for rank in found)
    for i, state in expected.items():
        assert all(torch.allclose(first[i][name], state[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert first[i]["step"] == second[i]["step"] == 1
        assert second[i]["exp_avg"] is None and second[i]["exp_avg_sq"] is None


def test_a_sharded_policy_samples_in_the_samplers_place_and_gives_it_back(found):
    assert all(rank["lent"] and rank["given back"] for rank in found)


@pytest.mark.parametrize("row", ["dapo", "icpo"])
def test_rows_that_sample_more_keep_the_processes_equal(found, row):
    """One may replace groups more often than the other; batches differ, the update and what is reported do not."""
    (metrics, rewards, weights), (other_metrics, other_rewards, other_weights) = (r[f"{row}, sampled"] for r in found)
    assert metrics == other_metrics and metrics["grad_norm"] > 0
    assert rewards.shape == other_rewards.shape == (P // 2, K)
    assert metrics["reward"] == pytest.approx(torch.cat([rewards, other_rewards]).mean().item())
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_the_mean_of_the_processes_means_would_be_another_number():
    """What the comparison above would not forgive: each process dividing by its own token count."""
    batch = joined_batch()
    advantages = lm.group_advantages(batch.rewards).flatten()
    parts = [slice(0, 2 * K), slice(2 * K, 4 * K)]
    zero = torch.zeros(P * K, T)
    together, *losses = [lm.policy_loss(zero[rows] - 1, zero[rows], advantages[rows], batch.mask[rows],
                                        algorithm="reinforce")[0] for rows in (slice(None), *parts)]
    assert abs(sum(losses) / 2 - together) > 0.1 * abs(together)


def test_processes_sample_different_responses_to_different_prompts(found):
    """C55: half of the batch's questions each, and other responses even to the same prompt."""
    first, second = found
    task = [Example(f"{i:b}", "1", f"{i:b}") for i in range(8)]
    whole = [example.question for example in batch_examples(task, 1, count=P, seed=0)]
    assert first["questions"] == whole[0::2] and second["questions"] == whole[1::2]
    width = min(first["completions"].shape[1], second["completions"].shape[1])
    assert not torch.equal(first["completions"][:, :width], second["completions"][:, :width])


def run(argv):
    """In the child: a run without its pictures."""
    runs.plot_run = lambda *arguments, **options: None
    lm.main(argv)


def torchrun(*arguments, size=2):
    """(exit status, output) of 06 under PyTorch's launcher."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run([*launcher, ROOT / "06_full_llm_training.py", *arguments], check=False, capture_output=True,
                          text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return [(done.returncode, done.stdout + done.stderr)]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["replicas", "shards"])
def test_a_run_of_two_processes_stops_resumes_and_loads(tiny_run, tmp_path, capsys, shard):
    """Two steps and a resumed third and fourth are the four of a straight run, line by line; then the model loads.

    The straight run of replicas is started by torchrun; the others are forked, with the environment that it gives.
    """
    from transformers import AutoModelForCausalLM

    _, _, flags = tiny_run
    flags = [*flags, *shard, "--sync-interval", "3", "--sync-offset", "1", "--save-every", "2", "--eval-every", "1"]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    for out, steps, more in ((straight, 4, []), (parted, 2, []), (parted, 4, ["--resume"])):
        argv = [*flags, "--steps", str(steps), "--out", str(out), *more]
        ends = (torchrun(*argv) if out == straight and not shard
                else processes.call_together(run, argv, folder=tmp_path))
        assert all(status == 0 for status, _ in ends), ends

    def lines(out):
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]

    assert [row["step"] for row in lines(parted)] == [0, 1, 2, 3, 4]
    config = lm.Config(**{**json.loads((straight / "config.json").read_text()), "shard": False})
    alone = evaluation.evaluate(lm.collect, *load_model(config.model, device="cpu"), load_task(config), config)
    for name in ("eval_greedy", "eval_greedy_low", "eval_greedy_high"):  # of all questions, each of them once
        assert alone[name] == lines(straight)[0][name]
    assert lines(parted) == lines(straight)
    final = AutoModelForCausalLM.from_pretrained(parted / "model")
    again = AutoModelForCausalLM.from_pretrained(straight / "checkpoint/step-000004")
    assert type(final).__name__ == "Qwen2ForCausalLM" and final.dtype == torch.float32
    for a, b in zip(final.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    saved = load_checkpoint(straight)["optimizer"]["state"]  # whole also where it was split
    assert all(saved[i]["exp_avg"].shape == p.shape for i, p in enumerate(final.parameters()))
    if not shard:
        with pytest.raises(SystemExit) as stop:
            lm.main([*flags, "--steps", "6", "--out", str(parted), "--resume"])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        assert "saved by 2 processes" in error and "--nproc-per-node" in error


def fail_on_one(argv):
    """In the child: a run whose reward fails on rank 1 only."""
    lm.main([*argv, "--reward", f"test_parallel:{'works' if os.environ['RANK'] == '0' else 'fails'}"])


def test_too_few_held_out_questions_for_the_processes_are_refused_by_all(tiny_run, tmp_path):
    """Three questions hold out one, which only --eval-questions of the flags cannot know."""
    (tmp_path / "few.jsonl").write_text("".join(f'{{"question": "{i:b}", "answer": "1"}}\n' for i in range(3)))
    argv = [*tiny_run[2], "--task", str(tmp_path / "few.jsonl"), "--out", str(tmp_path / "run")]
    for status, output in processes.call_together(run, argv, folder=tmp_path):
        assert status == 2 and "1 held-out questions are too few for 2 processes" in output.splitlines()[-1], output


def works(question, response, answer):
    return 1.0


def fails(question, response, answer):
    raise RuntimeError("no more")


def test_a_process_that_fails_ends_the_others_and_its_message_says_why(tiny_run, tmp_path):
    (first, others), (status, own) = processes.call_together(
        fail_on_one, [*tiny_run[2], "--steps", "1", "--out", str(tmp_path / "run")], folder=tmp_path)
    assert status == 2 and "RuntimeError: no more" in own.splitlines()[-1], own
    assert first == 1 and "stopped: another process failed" in others and "Traceback" not in others, others


@pytest.mark.parametrize("flags, words", [
    (["--prompts-per-step", "3"], "must be a multiple of 2"),
    (["--compare", "grpo,reinforce"], "without torchrun"),
    (["--algorithm", "aepo", "--shard"], "aepo: steering the entropy samples from the policy"),
    (["--algorithm", "grpo", "--entropy-target", "0.5", "--shard"], "grpo: steering the entropy samples"),
])
def test_what_processes_cannot_share_is_refused_in_one_line(monkeypatch, capsys, flags, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        lm.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


def test_shard_alone_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        lm.main(["--shard"])
    assert "torchrun" in capsys.readouterr().err


def test_a_policy_that_lends_its_weights_to_the_sampler_takes_them_back():
    policy, sampler = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = {name: weight.clone() for name, weight in sampler.state_dict().items()}
    policy.is_sharded = True
    with parallel.policy_to_sample(policy, sampler) as lent:
        assert lent is sampler and torch.equal(sampler.weight, policy.weight)
    assert all(torch.equal(weight, before[name]) for name, weight in sampler.state_dict().items())


@pytest.mark.parametrize("rank, order", [(0, ["block", "barrier"]), (1, ["barrier", "block"])])
def test_the_main_process_is_first(monkeypatch, rank, order):
    seen = []
    monkeypatch.setattr(parallel, "rank", lambda: rank)
    monkeypatch.setattr(parallel, "barrier", lambda: seen.append("barrier"))
    with parallel.main_process_first():
        seen.append("block")
    assert seen == order
