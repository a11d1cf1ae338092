"""The model of one vLLM engine: what it caches, what it computes in a step, how long that takes.

    blocks          the paged KV cache: look up, allocate, cache, evict
    window_blocks   the same for models with sliding windows
    scheduler       which tokens run in the next step
    time_model      how long a step takes
    cpu_tier        a replica's blocks in the memory of its machine
    pool            a shared pool of blocks

Nothing here has a clock or a socket. `loadtest.emulator` runs it in real time behind HTTP and ZMQ,
`loadtest.simulator` runs it in virtual time.
"""
