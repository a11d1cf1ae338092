"""`warmroute compare`: one workload at several policies or targets, in interleaved rounds.

    variants    the variants that are compared
    setting     the order of runs, and what else was asked for
    places      where runs happen: simulated, on emulated replicas, on engines, at targets
    study       goes through the rounds
    store       the directory of a comparison
    hygiene     checks of the figures
    report      figures and comparisons
    answer, tables, terminal, page
                how they are shown

The demo is a preset of it.
"""
