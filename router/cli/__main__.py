"""`python -m router.cli`: the same as `warmroute`."""

from router.cli import main

main()
