"""Three questions on reading a run of 06, from its metrics: which row, how stale, what went wrong?

    python 06_full_llm_training.py --exercise 1
"""

WHICH_ROW = """the built-in model, sampler refreshed every 20 steps. Which row is it:
reinforce, rec-oneside-nois or rep-opmd?

    step  staleness  clip_fraction  kl_old  ratio_p05  ratio_max   ess  eval_accuracy
      20         19           .000    .105       .408       10.5   .44            .31
      40         19           .000    .280       .168       63.5   .12            .27
      60         19           .000    .398       .046       66.5   .06            .27
      80         19           .000    .587       .023       29.3   .09            .24
"""
HOW_STALE = """rec-oneside-nois on the built-in model. What are I (--sync-interval) and m (--sync-offset)?
Answer as I,m (such as 8,0).

    step           1    2    3    4    5    6    7    8    9   10   11   12   13   14
    staleness      0    1    2    3    4    5    2    3    4    5    2    3    4    5
    clip_fraction .00  .05  .05  .05  .04  .06  .03  .06  .08  .11  .03  .04  .05  .08
"""
WHAT_WENT_WRONG = """grpo on fresh data: sampler and policy are one model, refreshed before every step. Something is
wrong with this trainer. Which number of step 1 gives it away, in nats a token: reward, kl_old, staleness or entropy?

    step  staleness  reward  kl_old  entropy  clip_fraction  ratio_p05  ratio_mean  ratio_p95
       1          0     .50    .067      .93           .117        .76        1.01       2.12
       2          0     .47    .047      .93           .109        .76         .97       1.53
      20          0     .47    .046      .84           .080        .78         .98       1.58
"""

EXERCISES = {
    1: (WHICH_ROW, "reinforce",
        ("Nothing is ever clipped, though the largest ratio is 66: there is no clip. And kl_old, the distance from the "
        "sampler, grows without bound; rep-opmd's penalty would hold it. Accuracy falls below where it began.")),
    2: (HOW_STALE, "4,2",
        ("Staleness rises by 1 a step and falls back every 4 steps: I = 4. Once the queue is full it never falls below "
        "2, since every batch waits behind two others: m = 2, and s runs from m to m + I − 1. The ratios spread with "
        "it, so the clip works most just before a refresh.")),
    3: (WHAT_WENT_WRONG, "kl_old",
        ("Fresh data have staleness 0, so at step 1 every ratio must be 1, and kl_old and clip_fraction 0. Here the "
        "sampler drew at temperature .7 and the trainer scored at 1: the run is off-policy without a word, and GRPO "
        "clips a tenth of its tokens for it. 06 itself would not start: its self-check compares the two.")),
}
