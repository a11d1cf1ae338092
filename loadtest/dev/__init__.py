"""What only developers run: benchmarks, chaos, the league of routers, the generated documentation.

Not in the wheel.
"""
