"""The grid study: policies and other routers on two small engines, real or simulated."""
