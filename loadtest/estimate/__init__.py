"""`warmroute estimate`: how much cache-aware routing would save on recorded traffic.

saving      one workload under each kind of routing, simulated, and what they differ in
cli         options in, a table and a verdict out
"""
