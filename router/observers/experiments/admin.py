"""The admin port's routes for experiments."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from router.config import experiment_of
from router.config.experiments import check
from router.http.admin_pages import Handler, as_bad_request, json_answer, read_body
from router.observers.experiments.runner import ExperimentRunner


class _Ramp(Struct, forbid_unknown_fields=True):
    shares: Annotated[dict[str, float], Meta(min_length=1)]


class _Stop(Struct, forbid_unknown_fields=True):
    variant: str | None = None
    arm: str | None = None  # its earlier name
    reason: Annotated[str, Meta(max_length=200)] = "stopped by an operator"


class ExperimentPages:
    """Experiments."""

    def __init__(self, runner: ExperimentRunner) -> None:
        self._runner = runner

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/experiments": self._experiments,
            "POST /admin/experiments": self._start,
            "GET /admin/experiments/{name}": self._experiment,
            "POST /admin/experiments/{name}/ramp": self._ramp,
            "POST /admin/experiments/{name}/stop": self._stop,
            "DELETE /admin/experiments/{name}": self._forget,
        }

    async def _experiments(self, _: web.Request) -> web.Response:
        names = [trial.state.definition.name for trial in self._runner.trials]
        return json_answer({"experiments": [self._described(name) for name in names]})

    async def _experiment(self, request: web.Request) -> web.Response:
        return json_answer(self._described(request.match_info["name"]))

    async def _start(self, request: web.Request) -> web.Response:
        tree = await read_body(request, dict[str, Any], '{"name": …, "variants": [{…}, {…}]}')
        with as_bad_request():
            definition = experiment_of(tree)
            check(definition)
            self._runner.start(definition, time.time())
        return json_answer(self._described(definition.name), status=201)

    async def _ramp(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, _Ramp, '{"shares": {"VARIANT": 0.5}}')
        name = request.match_info["name"]
        with as_bad_request():
            self._runner.ramp(name, wanted.shares, time.time())
        return json_answer(self._described(name))

    async def _stop(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, _Stop, '{}, or {"variant": "NAME", "reason": "why"}')
        name = request.match_info["name"]
        with as_bad_request():
            self._runner.stop(name, time.time(), wanted.reason, arm=wanted.variant or wanted.arm)
        return json_answer(self._described(name))

    async def _forget(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._runner.remove(name, time.time())
        return json_answer({"name": name, "removed": True})

    def _described(self, name: str) -> dict[str, Any]:
        return self._runner.describe(name, time.time())
