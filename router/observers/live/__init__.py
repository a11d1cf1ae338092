"""What people watch while it happens: the live page and `warmroute tail`.

    lines    finished requests as lines, for their listeners     `Feed`
    recent   requests and tokens by cause of the last minutes    `TrafficHistory`
    state    replicas, queue, sessions and the rest as one line  `LiveState`
    degraded what of it does not work as it should, in words     `degraded`

Nothing here is in a request's way. Without a listener, a finished request costs one comparison.
"""
