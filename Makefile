# Two commands do everything on a fresh machine: `make run` and `make test`. Each makes .venv when it is absent.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
LESSONS := $(sort $(wildcard 0[1-5]_*.py))

.PHONY: run lessons main test

run: lessons main                    # the lessons, then the main job

lessons: $(VENV)/ready               # 01–05: prove every equation, write figures/
	@for lesson in $(LESSONS); do echo "== $$lesson"; $(PY) $$lesson || exit 1; done

main: $(VENV)/ready                  # a real transformer on stale data, with and without clipping
	$(PY) 06_full_llm_training.py --compare reinforce,grpo,rec-oneside-nois --sync-interval 20 --out runs/main --overwrite

test: $(VENV)/ready
	$(PY) -m pytest -q tests

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements.txt
	@touch $@
