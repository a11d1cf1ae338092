"""`warmroute check`: what `warmroute serve` would find, and what to do about what is wrong.

    seen        what was looked at, as data                         `ReplicaSeen`, `RedisSeen`, …
    checks, replicas, tokenizers, stores, here
                looking: by the router's own clients, with a deadline; the rest has no I/O
    *_rules     from what was seen to findings: pure
    findings    a finding: ok, note, warning or error, with a hint  `Finding`, `Report`
    rendering   a report for people

Nothing is changed by looking. No lease is taken, no request goes to a model, Redis is only read,
ports are tried and left. Engines see what they see of a router that starts: questions about
themselves, a subscription, one replay of their events and a few tokens to tokenize.
"""

from router.check.checks import check
from router.check.findings import Finding, Report
from router.check.rendering import render

__all__ = ["Finding", "Report", "check", "render"]
