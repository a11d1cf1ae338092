"""`warmroute compare`: one workload at several policies or targets, in interleaved rounds.

arms        the variants that are compared; order: which one runs when
setting     what was asked for, kept beside the runs
places      where runs happen: simulated, on emulated replicas, on engines, at targets
study       goes through the rounds
store       the directory of a comparison
hygiene     what speaks for and against the figures
report      figures and comparisons; answer, terminal, page: how they are shown
"""
