"""Real engines as processes: vLLM replicas and a Mooncake pool, for the suite and the league.

    process     a server of ours: started, awaited, killed by its group
    fork_client engines are forks of one process that has imported vLLM (site/fork_server.py)
    ports       free ones, not given again soon
    vllm        a replica with KV events, small enough for two of them on two cores
    mooncake    the pool's master, its memory, and replicas that use it
    site/       what the engines' interpreter runs: at the start of every process of it, for
                reasons that its sitecustomize.py gives, to fork engines, and in place of loops
                that wait without a pause (yield.c)

Everything listens on 127.0.0.1 (vLLM's event sockets bind every address).
"""
