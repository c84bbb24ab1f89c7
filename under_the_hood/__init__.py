"""The engine room of 06_full_llm_training.py: what makes it fast and dependable, one room a purpose; map: README.md."""

import os

# Threads that wait for each other spin for some microseconds, then sleep. Spinning for long slows training several
# times when the machine has other work; sleeping at once doubles the time of the built-in model's small matrices. This
# must be said before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
