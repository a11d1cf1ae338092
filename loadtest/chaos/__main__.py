"""`python -m loadtest.chaos`."""

from loadtest.chaos.cli import main

main()
