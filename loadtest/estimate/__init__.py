"""`warmroute estimate`: how much cache-aware routing would save on recorded traffic."""
