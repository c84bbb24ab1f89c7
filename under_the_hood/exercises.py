"""Three questions on reading a run; python 06_full_llm_training.py --exercise 1."""

EXERCISES = {}
