"""What people watch while it happens: the live page and `warmroute tail`.

    feed     finished requests, for its listeners                `Feed`
    lines    one request as a line
    history  tokens by cause of the last minutes                 `TrafficHistory`
    state    replicas, queue, sessions and the rest as one line  `LiveState`
    degraded what of it does not work as it should, in words     `degraded`

Nothing here is in a request's way. Without a listener, a finished request costs one comparison.
"""
