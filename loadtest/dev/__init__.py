"""What only developers run: benchmarks, chaos, studies, peers, the generated documentation.

Not in the wheel.
"""
