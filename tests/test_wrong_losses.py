"""docs/wrong_losses.md: each exhibit's wrong lines are put into our code; a check by hand tells them from the right.

An exhibit is read from the page, its check is the function of the same name below. Ids such as C31 name small inputs
that trainers of this kind got wrong.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, bpe_tokenizer, build_bigram, build_digit_tokenizer, build_model

from under_the_hood.tasks import Example

sys.path.append(str(ROOT / "docs"))
from wrong_curves import PAGE, exhibits, load, module, seen

TEXT, FOUND = PAGE.read_text(encoding="utf-8"), exhibits()
torch.set_num_threads(1)


def near(found, expected, tolerance=1e-5):
    assert torch.as_tensor(found).tolist() == pytest.approx(expected, abs=tolerance)


def slope(lm, logprobs, old, advantages, mask=None, **options):
    """(gradient, metrics) of one-token responses, in the order given; a mean over tokens."""
    logprobs = torch.tensor(logprobs).view(-1, 1).requires_grad_()
    mask = torch.ones(logprobs.shape) if mask is None else torch.tensor(mask).view(-1, 1)
    loss, metrics = lm.policy_loss(logprobs, torch.tensor(old).view(-1, 1), torch.tensor(advantages), mask, **options)
    loss.backward()
    return logprobs.grad.flatten(), metrics


def scored(lm, logits, prompts, completions, **options):
    with torch.no_grad():
        return lm.token_logprobs(build_bigram(logits), torch.tensor(prompts), torch.tensor(completions), **options)[0]


LOGS = [math.log(ratio) for ratio in (1.5, 1.5, .5, .5)]  # C22: ratios of four tokens, A = +1, −1, +1, −1


def the_ratio_is_not_detached(lm):
    near(slope(lm, [-1.0], [-1.5], [1.0], algorithm="reinforce-is")[0], [-math.exp(.5)])


def the_clip_guards_the_wrong_side_where_a_0(lm):
    near(slope(lm, LOGS, [0.0] * 4, [1., -1., 1., -1.], algorithm="rec-oneside-is")[0], [0, 1.5 / 4, -.5 / 4, 0])


def padding_after_eos_is_trained_on(lm):  # C35
    """The sampler wrote 1, EOS (id 1), and then padding while another response went on."""
    tokenizer = build_digit_tokenizer()
    sampled = (torch.tensor([[4, 1, 0], [3, 4, 3]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), torch.zeros(2, 3))
    lm.ENGINES["written"] = (lambda *_, **__: sampled, None)
    config = lm.Config(engine="written", group_size=2)
    batch = lm.collect(build_model("qwen2", vocab_size=7), tokenizer, [Example("1+0=", "1")], config, version=0,
                       generator=None)
    assert batch.mask.tolist() == [[True, True, False], [True] * 3]


eos_is_not_trained_on = padding_after_eos_is_trained_on


def old_log_probabilities_re_made_under_the_new_policy(lm):
    """Two responses of one token, sampled with log π = log(1/2) − log 2: each ratio is 2, and A > 0 is clipped."""
    batch = lm.Rollout(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), torch.tensor([[0], [1]]),
                       torch.ones(2, 1, dtype=torch.bool), torch.full((2, 1), math.log(.25)),
                       torch.tensor([[1., 0.]]), torch.zeros(2), 0, [])
    model = build_bigram([[0.0, 0.0], [0.0, 0.0]])
    metrics = lm.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, lm.Config(engine="plain"),
                            algorithm=lm.ALGORITHMS["rec-oneside-is"], generator=None)
    near([float(metrics["ratio_mean"]), float(metrics["clip_fraction"])], [2, .5], 1e-4)


def temperature_missing_in_the_trainer(lm):  # C27
    near(scored(lm, [[2.0, 1.0, 0.0]] * 3, [[0]], [[0, 1, 2]], temperature=.5)[0], [-.1429316, -2.1429316, -4.1429316])


def a_mean_of_sequences_where_a_mean_of_tokens_was_meant(lm):  # C12
    mask = torch.tensor([[1., 0, 0, 0], [1, 1, 1, 1]])
    loss = torch.tensor([[1., 0, 0, 0], [.5] * 4])
    near((lm.token_weights(mask, aggregation="token-mean") * loss).sum(), .6)


def the_standard_deviation_of_the_batch(lm):  # C04
    found = lm.group_advantages(torch.tensor([[1., 0, 0, 0], [1, 1, 0, 0]]), std_normalize=True)
    near(found[0], [1.7320508] + [-.5773503] * 3)
    near(found[1], [1, 1, -1, -1])


def the_mean_of_the_batch(lm):  # C04
    near(lm.group_advantages(torch.tensor([[1., 0, 0, 0], [1, 1, 1, 0]]))[0], [.75, -.25, -.25, -.25])


def a_mean_of_the_micro_batches_means(lm):  # C13
    """Groups of 2 + 1 and of 4 + 1 tokens, each right and wrong, log π = −log 2: A is ½ and −½, so their losses sum to
    ½ log 2 and 3/2 log 2, over 8 tokens. The mean of their means would be (½/3 + 3/2/5)/2 · log 2."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    batch = lm.Rollout(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), torch.zeros(4, 4, dtype=torch.long), mask,
                       torch.zeros(4, 4), torch.tensor([[1., 0.], [1., 0.]]), torch.zeros(4), 0, [])
    model = build_bigram([[0.0, 0.0], [0.0, 0.0]])
    metrics = lm.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch,
                            lm.Config(engine="plain", micro_batch_tokens=1), algorithm=lm.ALGORITHMS["reinforce"],
                            generator=None)
    near(metrics["loss"], 2 / 8 * math.log(2))


def nan_times_0(lm):  # C16
    near(slope(lm, [-1., math.nan], [-1., math.nan], [1., 1.], [1., 0.], algorithm="reinforce")[0], [-1, 0])


def flat_groups_that_are_not_flat_in_float32(lm):  # C02
    assert lm.group_advantages(torch.full((7,), .1), std_normalize=True).tolist() == [0] * 7


BIGRAM = [[math.log(p) for p in row] for row in ([.7, .2, .1], [.1, .3, .6], [.25, .25, .5])]


def prompts_tiled_samples_interleaved(lm):
    near(scored(lm, BIGRAM, [[0], [1]], [[2]] * 4)[:, 0].exp(), [.1, .1, .6, .6])


def dropout_is_on(models):
    model = build_model("gpt2", vocab_size=9).train()  # dropout .1
    run = models.in_eval_mode(lambda model: model(input_ids=torch.tensor([[3, 4, 5]])).logits)
    assert torch.equal(run(model), run(model))


def log_probabilities_in_bfloat16(lm):  # C27: −.4076060 −1.4076060 −2.4076060
    near(scored(lm, [[2.0, 1.0, 0.0]] * 3, [[0]], [[0, 1, 2]]).sum(), -4.2228180, 1e-4)


def kl_k1_in_the_loss(lm):
    """C20, π = [.5, .5], ref = [.8, .2]: the gradient of KL(π ‖ ref) by log π is log(π/ref)."""
    near(slope(lm, [math.log(.5)] * 2, [math.log(.8), math.log(.2)], [0., 0.], algorithm="reinforce", tau=1.0)[0],
         [-.4700036 / 2, .9162907 / 2])


def the_kl_estimator_turned_round(lm):
    """The sampler [.8, .2] drew token 0 four times of five: KL = .8 log 1.6 + .2 log .4 = .1927448."""
    _, metrics = slope(lm, [math.log(.5)] * 5, [math.log(.8)] * 4 + [math.log(.2)], [0.] * 5, algorithm="reinforce")
    near(metrics["kl_old"], .1927448)


def leave_one_out_and_k_k_1_both(lm):
    near(lm.group_advantages(torch.tensor([1., 0, 0, 0]), leave_one_out=True), [1, -1 / 3, -1 / 3, -1 / 3])


def the_sampler_is_the_policy_s_own_weights(models):  # C59
    model = torch.nn.Linear(1, 1, bias=False)
    model.device, model.config = torch.device("cpu"), None
    sampler = models.copy_for_sampling(model, types.SimpleNamespace(sync_interval=4, offline=False, shard=False,
                                                                    engine="plain"))
    before = sampler.weight.item()
    with torch.no_grad():
        model.weight.sub_(.1)
    assert sampler.weight.item() == before


def top_k_in_sampling_only(lm):  # C33
    logits = [[math.log(p) for p in (.5, .3, .15, .05)]] * 4
    tokens, _, logprobs = lm.generate(build_bigram(logits), torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool),
                                      group_size=8, max_new_tokens=1, temperature=1.0, eos_ids={9}, pad_id=0,
                                      generator=torch.Generator().manual_seed(0))
    near(logprobs[:, 0].exp(), [(.5, .3, .15, .05)[token] for token in tokens[:, 0].tolist()])


def off_by_one_in_the_logits(lm):
    near(scored(lm, BIGRAM, [[0]], [[1, 2, 0]])[0].exp(), [.2, .6, .25])


def clip_fraction_without_the_sign_of_a(lm):  # C22
    near(slope(lm, LOGS, [0.0] * 4, [1., -1., 1., -1.], algorithm="rec-oneside-is")[1]["clip_fraction"], .5)


def two_bos_tokens(models):  # C40: <s> is 0
    ids, _ = models.encode_prompts(bpe_tokenizer(bos=True, chat=True), [Example("1 + 1?", "2")], device="cpu")
    assert ids[0].tolist().count(0) == 1


def resumed_without_the_queue(runs):
    """Saved after step 2 with one batch in the queue, sampled by version 1."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mine = {"random": runs.random_state(), "queue": [{"version": torch.tensor(1)}]}
    state = {"processes": [mine], "optimizer": optimizer.state_dict(), "sampler": None, "step": 2, "version": 2}
    run = types.SimpleNamespace(state=state, model=model, optimizer=optimizer, generators=(), copied=False, out="",
                                config=types.SimpleNamespace(learning_rate=1.0))
    version, queue = runs.Run._restore(run, dict)
    assert version == 2 and [int(batch["version"]) for batch in queue] == [1]


def greedy_accuracy_called_sampled_accuracy(evaluation):
    """A policy that is right in one of four samples, and always in its greedy answer."""
    def collect(model, tokenizer, examples, config, **_):
        rewards = torch.eye(4)[:1, :config.group_size] if config.temperature else torch.ones(1, config.group_size)
        return types.SimpleNamespace(rewards=rewards, truncated=torch.zeros(1))

    @dataclasses.dataclass
    class Config:
        eval_samples: int = 4
        seed: int = 0
        group_size: int = 8
        temperature: float = 1.0

    metrics = evaluation.evaluate(collect, torch.nn.Linear(1, 1), None, types.SimpleNamespace(evaluation=[0]), Config())
    near([metrics["eval_accuracy"], metrics["eval_greedy"]], [.25, 1])


def check_of(title):
    return globals()[re.sub(r"\W+", "_", title.lower()).strip("_")]


def test_page_and_file_have_one_list():
    assert [*FOUND] == [*range(1, TEXT.count("\n## ") + 1)]
    assert len({check_of(one.title).__name__ for one in FOUND.values()}) >= len(FOUND) - 1  # two share a small input
    assert max(map(len, TEXT.splitlines())) <= 120 and TEXT.count("\n") <= 420


@pytest.fixture(scope="module")
def right():
    return {file: module(file) for file in {one.file for one in FOUND.values()}}


each = pytest.mark.parametrize("one", FOUND.values(), ids=[one.title for one in FOUND.values()])


@each
def test_exhibit(one, right):
    check = check_of(one.title)
    wrong = module(one.file, one.diff)
    check(right[one.file])
    with pytest.raises(AssertionError):
        check(wrong)
    assert f"def {one.test}(" in (ROOT / one.tests).read_text(encoding="utf-8")


@each
def test_what_one_sees_is_what_the_run_saw(one):
    """The numbers on the page are those of figures/data/wrong_losses.csv, of runs with the page's own wrong lines."""
    assert seen(one, load()) in one.text


@pytest.mark.slow
@each
def test_the_test_that_the_page_names_fails_with_the_wrong_lines(one):
    """In another process, whose modules have the wrong lines; without them the ordinary suite sees it pass."""
    code = ("import sys, pytest; from wrong_curves import module; module(*sys.argv[1:3], install=True); "
            "sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', sys.argv[3]]))")
    run = subprocess.run([sys.executable, "-c", code, one.file, one.diff, f"{one.tests}::{one.test}"], cwd=ROOT,
                         capture_output=True, text=True, timeout=300, env=os.environ | {
                             "PYTHONPATH": os.pathsep.join([str(ROOT / "docs"), str(ROOT)]), "OMP_NUM_THREADS": "1"})
    assert run.returncode == 1 and "AssertionError" in run.stdout, run.stdout + run.stderr
