"""`warmroute check`: find what `warmroute serve` would find, and say what to do.

    replica, events, tokenizer      a file for each system: `look` asks, with the router's own
    redis, mooncake                 clients and a deadline; `judge` is pure
    sources, host                   sources of replicas, ports and files
    together                        judges what only several replicas can have wrong
    seen                            what was seen of a replica, in the router's own structs;
                                    whether something listens, and how long to wait
    run                             looks at everything, then judges
    finding, report                 a finding: ok, note, warning or error, with a hint; the report

`warmroute status` says what a running router knows. Looking changes nothing. No lease is taken, no
request goes to a model, Redis is only read, ports are tried and left. Engines see what they see of
a router that starts: questions about themselves, a subscription, one replay of their events and a
few tokens to tokenize.
"""

from router.check.finding import Finding
from router.check.report import Report, described, render, state_of
from router.check.run import check

__all__ = ["Finding", "Report", "check", "described", "render", "state_of"]
