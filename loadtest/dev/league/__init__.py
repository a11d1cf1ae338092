"""Routers before the same replicas, under constant load: who answers more, and sooner?

    cell       replicas and traffic of one table
    routers    ours in variants, and others: how each is installed and started
    replicas   real vLLM, emulated or simulated replicas, with cold caches for each run
    spoken     the words of block ids: conversations of messages
    run        one router, one seed: sent, watched, summed up
    table      the table, and the JSON file

`python -m loadtest.dev.league --help`.
"""
