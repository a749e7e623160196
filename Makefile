# make demo: the main job, in an environment of its own.   make test: all tests.   make clean: remove what both made.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow runtimes lint plots bench bench-cuda clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,test,plot]'
	touch $@

demo: .venv/installed
	$(BIN)/python train_copy.py
	$(BIN)/python export_onnx.py copy.pt
	$(BIN)/python run_onnx.py onnx 5 6 7 8 9 --check copy.pt
	$(BIN)/python run_onnx.py onnx/greedy.onnx 5 6 7 8 9 --check copy.pt --time 20
	$(BIN)/python run_onnx.py onnx/beam.onnx 5 6 7 8 9 --check copy.pt --time 20

test: .venv/installed
	$(BIN)/python -m pytest tests

slow: .venv/installed  # base size, and code that torch.compile generates: some minutes, 3 GB
	$(BIN)/python -m pytest tests -m slow

runtimes: .venv/installed  # the graphs in OpenVINO, Node.js and Chromium, which must be there
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,test,plot,runtimes]'
	npm ci --prefix tests/runtimes --ignore-scripts --no-audit --no-fund
	REQUIRE_RUNTIMES=1 $(BIN)/python -m pytest tests/test_runtimes.py tests/test_examples.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

plots: .venv/installed
	$(BIN)/python examples/plots.py copy.pt

bench: .venv/installed  # 25 minutes with nothing else running; writes docs/performance.md
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,plot,bench]'
	$(BIN)/python bench/speed.py

bench-cuda:  # in an environment that holds onnxruntime-gpu and a torch for CUDA; writes docs/performance-cuda.md
	$(PYTHON) bench/speed.py --device cuda

clean:
	rm -rf .venv copy.pt onnx *.egg-info
