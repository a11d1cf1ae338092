"""`python -m loadtest.dev.chaos`."""

from loadtest.dev.chaos.cli import main

main()
