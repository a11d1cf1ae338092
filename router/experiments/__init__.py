"""Experiments on live traffic: which request gets which variant, and what stops a variant.

This package has the assignment, the time slots, the evidence against a variant, the orders, and the
merging of several routers' orders. It reads no clock, does no I/O and knows no request.
"""
