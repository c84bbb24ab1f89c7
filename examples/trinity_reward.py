"""The reward of 06 as a reward function of Trinity-RFT: with Trinity's own, "46" in plain words would count as wrong.

`06_full_llm_training.py --export trinity` names it (default_reward_fn_type: trinity_reward.OurReward) and puts this
folder on PYTHONPATH. reward: your own module:function. Trinity's simple_workflow does not pass on the question, so that
it sees "".
"""

import pathlib
import sys

from trinity.common.rewards import RewardFn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from under_the_hood.tasks import reward_function


class OurReward(RewardFn):
    def __init__(self, task="addition", reward=None):
        self.reward = reward_function(reward, task)

    def __call__(self, response, truth=None, prompt=None, **_):
        return {"accuracy": self.reward(prompt or "", response, truth)}
