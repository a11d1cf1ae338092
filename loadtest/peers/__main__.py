"""`python -m loadtest.peers`."""

from loadtest.peers.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
