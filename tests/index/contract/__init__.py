"""One suite for every index: whatever happened, it says what the engines hold.

`engine` plays engines and is the plain model, `backend` is the seam,
`redis_backend` the routers that share a Redis, `test_contract` the suite,
`test_walks` its long way.
"""
