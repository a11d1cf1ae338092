"""Experiments on live traffic: which request gets which variant, and what stops one.

What must live here: assignment, time slots, evidence against a variant, orders and how those of
several routers become one. What must not: a clock, I/O, the request itself. The caller brings
the wall clock's time (`at_s`, unix seconds), for it is what routers have in common.
"""
