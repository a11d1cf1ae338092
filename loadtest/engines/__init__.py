"""Real engines as processes: vLLM replicas and a Mooncake pool, for the suite and for studies.

    process     a server of ours: started, awaited, killed by its group
    ports       free ones, not given again soon
    vllm        a replica with KV events, small enough for two of them on two cores
    mooncake    the pool's master, its memory, and replicas that use it
    site/       what runs at the start of every engine process; its sitecustomize.py says why

Everything listens on 127.0.0.1 (vLLM's event sockets bind every address).
"""
