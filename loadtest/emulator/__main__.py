"""`python -m loadtest.emulator`."""

from loadtest.emulator.cli import emulate

if __name__ == "__main__":
    emulate()
