# make demo: train a tiny model from scratch · make demo-llm: train a real chat model of 135M;
#   KEYS="lora.rank=16 optimizer.lr=2e-4" overrides keys of the run
# make unit: the unit tests alone · make test: every test this machine can run · make soak: full counts
# make docs: README.md and docs/ as pages in site/
# What tools/setup_environment.sh finds by itself: the Python of .venv, cpu or gpu, and an index with the CPU build of torch.
PYTHON ?=
DEVICE ?=
TORCH_INDEX ?=

PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
# Whoever sets it would have each of a thousand short processes compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: asked setup demo demo-llm docs unit test soak lint clean
setup: .venv/.installed

.venv/.installed: requirements-cpu.lock requirements-gpu.lock setup.py pyproject.toml tools/setup_environment.sh \
                  $(if $(DEVICE),asked)
	@PYTHON="$(PYTHON)" DEVICE="$(DEVICE)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/setup_environment.sh
	@touch $@

demo: setup
	$(PY) tools/demo.py $(KEYS)

demo-llm: setup
	$(PY) tools/demo_llm.py $(KEYS)

docs: .venv/.test-packages
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -b html -c tools/docs_site . site
	cp site/README.html site/index.html
	@echo site/index.html

.venv/.test-packages: .venv/.installed requirements-test.lock
	@echo "installing packages that only tests and docs need ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-test.lock
	@touch $@

PYTEST := $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not soak and not gpu"
unit: .venv/.test-packages
	$(PYTEST) tests/unit

test: .venv/.test-packages lint
	$(PYTEST)

soak: .venv/.test-packages
	$(PY) -m pytest -m "soak"

lint: .venv/.test-packages
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright

clean:
	rm -rf .venv build site *.egg-info
