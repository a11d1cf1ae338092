"""A model directory without weights: real tokenizer, real chat template, dummy parameters.

Everything that works without a download uses it: the emulator, the tests, and real vLLM with
`--load-format dummy`. `python -m loadtest.tiny_model` trains the tokenizer again from the standard
library's sources. The result is committed, because sources differ between Python releases.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent
