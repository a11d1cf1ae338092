"""One benchmark per budget (`bench_<name>.py`), and what they share.

    measures         lines, budgets, verdicts
    rig              a router process in front of fake replicas
    fake_engine      replicas that answer at once, with KV events that the bench writes
    client           a raw HTTP client that times answers
    conversations    agents' requests with their tokens and block keys known beforehand
    report           the table, and the same as JSON

`python -m loadtest.dev.bench [NAME ...]` runs them.
"""
