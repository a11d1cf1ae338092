"""`warmroute check`: what `warmroute serve` would find, and what to do about what is wrong.

    replica, events, tokenizer    one file a system: what was seen, as data; `look`, by the
    redis, mooncake, host, sources  router's own clients, with a deadline; `judge`, pure
    run                           looks at everything at once, then judges
    finding, report               a finding: ok, note, warning or error, with a hint; all of them
    deadline, reach               what looking has in common

Looking changes nothing. No lease is taken, no request goes to a model, Redis is only read, ports
are tried and left. Engines see what they see of a router that starts: questions about themselves,
a subscription, one replay of their events and a few tokens to tokenize.
"""

from router.check.finding import Finding
from router.check.report import Report, described, render, state_of
from router.check.run import check

__all__ = ["Finding", "Report", "check", "described", "render", "state_of"]
