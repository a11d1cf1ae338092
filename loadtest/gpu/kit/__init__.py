"""Pack vLLM and warmroute for a machine without a package index.

cli         the command line, and the steps in their order
asked       what the kit is for: packages, the target, what is left out
resolve     which releases the kit needs beside what the target has (uv)
download    their wheels (pip)
wheel       a wheel without some of its files
pieces      one stream of wheels, cut into pieces; the manifest
install     the program that travels with the pieces; standard library alone
"""

from loadtest.gpu.kit.cli import main

__all__ = ["main"]
