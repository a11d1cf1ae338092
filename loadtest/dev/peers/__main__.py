"""`python -m loadtest.dev.peers`."""

from loadtest.dev.peers.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
