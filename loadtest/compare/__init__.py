"""`warmroute compare`: run files of one workload, variant against variant.

    cli        reads run files
    report     figures and comparisons
    hygiene    what speaks against the figures
    shown      sentences and tables, on a terminal and as a page

The demo shows its runs with it.
"""
