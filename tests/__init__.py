"""Tests. What is set here must be before aiohttp is imported, by the tests and what they start."""

import os
from pathlib import Path

# One authority instead of 150: no test goes to a server that others have certified, and reading
# theirs takes 50 ms, twice in every process that imports aiohttp, once a client of httpx.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("startup") / "authority.pem")
os.environ.pop("SSL_CERT_DIR", None)
