"""Numbers for Prometheus. Floor 3: the store and the ledger are read when somebody scrapes. Names are public."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from pennypod.model.money import micros_to_usd
from pennypod.orchestrator.service import Service
from pennypod.orchestrator.spend import is_billing, month_start, spend
from pennypod.orchestrator.store import RUNNING, WAITING


class Metrics:
    """One registry per application, so that two in one process do not mix."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self.webhooks = Counter(
            "pennypod_webhooks",
            "Webhooks by source and by what became of them: accepted, repeated, ignored, or a problem's code",
            ["source", "result"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "pennypod_webhook_seconds",
            "Seconds from a webhook's first byte to its answer",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
            registry=self._registry,
        )
        self._registry.register(_State(service))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _State:
    """What is so at the moment of the scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        service, now = self._service, self._service.clock.now()
        counts = service.store.counts()
        runs = GaugeMetricFamily("pennypod_runs", "Accepted runs that wait or run", labels=["state"])
        for state in (WAITING, RUNNING):
            runs.add_metric([state], counts.get(state, 0))
        yield runs
        ended = GaugeMetricFamily("pennypod_runs_ended", "Runs that have ended", labels=["job", "outcome"])
        for (job, outcome), number in service.store.outcomes().items():
            ended.add_metric([job, outcome], number)
        yield ended
        yield GaugeMetricFamily("pennypod_runs_watched", "Runs whose training goes on unattended", len(service.room))
        attempts = service.ledger.attempts_since(month_start(now))
        yield GaugeMetricFamily("pennypod_pods_billing", "Pods that bill or may bill", sum(map(is_billing, attempts)))
        money = spend(attempts, now)
        yield GaugeMetricFamily("pennypod_burn_usd_per_hour", "Price of those pods", micros_to_usd(money.burn_per_h))
        spent = GaugeMetricFamily("pennypod_spend_usd", "Estimated spend, UTC", labels=["period"])
        spent.add_metric(["today"], micros_to_usd(money.today))
        spent.add_metric(["month"], micros_to_usd(money.month))
        yield spent
