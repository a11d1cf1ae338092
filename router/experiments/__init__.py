"""Experiments on live traffic: who gets which arm, and what stops one.

What must live here: assignment, time slots, evidence against an arm, orders and how those of
several routers become one. What must not: a clock, I/O, metrics, the request itself. Whoever
calls brings the wall clock's time (`at_s`, unix seconds), for it is what routers have in common.
"""

from router.experiments.assignment import Enrolment
from router.experiments.standing import Experiments, Trial
from router.experiments.state import Change, State, Stopped, decode_state, encode_state, merged

__all__ = [
    "Change",
    "Enrolment",
    "Experiments",
    "State",
    "Stopped",
    "Trial",
    "decode_state",
    "encode_state",
    "merged",
]
