"""Stand in for Grafana: refuse to start without what compose.yaml mounts, then be healthy."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

home = Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
assert json.loads(home.read_text())["panels"]
assert Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text()
for kind in ("datasources", "dashboards"):
    assert list(Path("/etc/grafana/provisioning", kind).glob("*.yaml")), kind
Path("/var/lib/grafana/written").touch()


class Health(BaseHTTPRequestHandler):
    """Answer `GET /api/health`."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()


ThreadingHTTPServer(("0.0.0.0", 3000), Health).serve_forever()
