# make demo: train a tiny model from scratch · make demo-llm: train a real chat model of 135M
# make test: every test this machine can run · make soak: full counts
PYTHON ?= python3.11
# Where pip finds the CPU build of torch when its own configuration has none: the address of a wheel index.
TORCH_INDEX ?=

PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo demo-llm test soak lint clean
setup: .venv/.installed

.venv/.installed: requirements-cpu.lock setup.py pyproject.toml tools/setup_environment.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/setup_environment.sh
	@touch $@

demo: setup
	$(PY) tools/demo.py

demo-llm: setup
	$(PY) tools/demo_llm.py

test: setup lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not soak and not gpu"

soak: setup
	$(PY) -m pytest -m "soak"

lint: setup
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean:
	rm -rf .venv build *.egg-info
