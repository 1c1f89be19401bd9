"""/metrics: the process's own metrics, and figures of runs and nodes read from the database at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.http.auth import require_admin_unless_loopback
from api.services import Services
from api.v1.models import Run
from api.v1.reads import present_runs, services_of
from orchestrator.db import tables
from whimbrel.errors import Unreachable
from whimbrel.limits import METRIC_RUNS_MAX

router = APIRouter(include_in_schema=False, dependencies=[Depends(require_admin_unless_loopback)])

RUN_STATES = ("pending", "starting", "running", "recovering", "paused", "completed", "failed", "stopped")
_RUN_GAUGES = {
    "head_version": ("whimbrel_run_head_version", "Newest committed policy version; -1 before the first."),
    "max_steps": ("whimbrel_run_max_steps", "Target of the run."),
    "reward": ("whimbrel_run_reward", "Mean reward of the newest step."),
    "tokens_per_s": ("whimbrel_run_tokens_per_second", "Tokens generated per second."),
    "staleness_mean": ("whimbrel_run_staleness_mean", "Mean staleness of the newest step's tokens, in versions."),
    "staleness_max": ("whimbrel_run_staleness_max", "Largest staleness of the newest step's tokens, in versions."),
    "ettr": ("whimbrel_run_ettr_ratio", "Effective training time ratio."),
    "open_incidents": ("whimbrel_run_open_incidents", "Incidents that are not recovered."),
    "workers_running": ("whimbrel_run_workers_running", "Workers that run."),
    "workers_total": ("whimbrel_run_workers", "Workers that the run has."),
}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text. A database that is away makes `whimbrel_database_up` 0, not the scrape fail."""
    services = services_of(request)
    request.app.state.http_metrics.streams.set(request.app.state.event_tail.readers)
    scraped = CollectorRegistry(auto_describe=False)
    scraped.register(_Families([*_controller_families(services), *await _database_families(services)]))
    text = generate_latest(request.app.state.registry) + generate_latest(scraped)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _controller_families(services: Services) -> list[Metric]:
    controller = services.controller
    return [
        GaugeMetricFamily("whimbrel_controller_leading", "1 while this process leads.", float(controller.leading)),
        GaugeMetricFamily("whimbrel_etcd_up", "1 while etcd answers.", float(controller.etcd_reachable)),
    ]


async def _database_families(services: Services) -> list[Metric]:
    up = GaugeMetricFamily("whimbrel_database_up", "1 while the database answers.")
    try:
        rows = await services.runs.list(limit=METRIC_RUNS_MAX)
        runs = await present_runs(services, rows)
        nodes = await services.fleet.nodes()
        groups = {run.id: await services.ledger.counts(run.id) for run in runs}
    except Unreachable:
        up.add_metric([], 0.0)
        return [up]
    up.add_metric([], 1.0)
    latest = _newest_by_name(runs)
    return [up, *_run_families(latest), _group_family(latest, groups), _node_family(nodes)]


def _newest_by_name(runs: list[Run]) -> list[Run]:
    """The label is the name, which a later run may reuse; runs come newest first."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.name, run)
    return list(found.values())


def _run_families(runs: list[Run]) -> list[Metric]:
    families: list[Metric] = []
    for field, (name, help_text) in _RUN_GAUGES.items():
        family = GaugeMetricFamily(name, help_text, labels=["run"])
        for run in runs:
            value = getattr(run.status, field)
            if value is not None:
                family.add_metric([run.name], float(value))
        families.append(family)
    states = GaugeMetricFamily("whimbrel_run_state", "1 for the state that the run is in.", labels=["run", "state"])
    recoveries = CounterMetricFamily("whimbrel_run_recoveries", "Recoveries of the run's workers.", labels=["run"])
    for run in runs:
        recoveries.add_metric([run.name], float(run.status.recoveries))
        for state in RUN_STATES:
            states.add_metric([run.name, state], float(run.status.state == state))
    return [*families, states, recoveries]


def _group_family(runs: list[Run], groups: dict[str, dict[str, int]]) -> Metric:
    family = GaugeMetricFamily("whimbrel_prompt_groups", "Prompt groups by state.", labels=["run", "state"])
    for run in runs:
        for state, count in groups[run.id].items():
            family.add_metric([run.name, state], float(count))
    return family


def _node_family(nodes: list[tables.Node]) -> Metric:
    family = GaugeMetricFamily("whimbrel_node_ready", "1 while the node takes workers.", labels=["node"])
    for node in nodes:
        family.add_metric([node.id], float(node.state == "ready"))
    return family
