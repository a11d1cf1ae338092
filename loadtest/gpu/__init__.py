"""The study on a real GPU, and the kit that brings vLLM to a machine without a package index.

    run    replicas, routers and agents on this machine; one JSON file and one page
    kit    vLLM and what it needs, as pieces that can be carried

Each subcommand is a module with `main(argv) -> exit status`. `__main__` imports only the one
that is asked for.
"""
