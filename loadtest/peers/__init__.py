"""warmroute beside other routers, in front of the same replicas: docs/research/comparison.md.

contestants    which routers, and how each is installed and started
front          one of them, running
forwarding     what of a request reaches a replica, byte for byte
cost           the time and the CPU that each adds, by size of the body
kill           what clients see when a replica dies under them
page           the document
"""
