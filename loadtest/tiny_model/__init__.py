"""A model directory without weights: real tokenizer, real chat template, dummy parameters.

What runs without a download runs on this: the emulator, the demo, the tests, and real vLLM with
`--load-format dummy`. `python -m loadtest.tiny_model` trains the tokenizer anew from the standard
library's sources; the result is committed, because sources differ between Python releases.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent
