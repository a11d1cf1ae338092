"""`python -m loadtest.dev.league`."""

from loadtest.dev.league.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
