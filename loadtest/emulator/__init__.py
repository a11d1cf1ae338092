"""One vLLM-compatible replica without a model, for tests, demos and benchmarks.

    from loadtest.emulator.emulator import Emulator
    from loadtest.emulator.options import EmulatorOptions

    async with Emulator(EmulatorOptions(block_size=32)) as replica:
        ...  # replica.url

Same routes, block manager, KV events and replay as vLLM 0.32.0; a time model instead of a GPU.
Nothing is imported here: the time model needs no tokenizer.
"""
