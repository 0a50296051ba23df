"""Ends pods, proves it, and leaves a receipt for each. Floor 2: providers and ledger, passed in.

The order of steps is the guarantee: the wish to end is on record before the first destroy call, the receipt is written
in the step that marks the attempt as gone, and whatever is not proven stays on the books as "may still be billing". A
ledger that cannot be written keeps no pod alive: it ends first, and is written down when that works again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pennypod.accounts import refuse_other_account
from pennypod.clock import Clock
from pennypod.errors import FencedError, PennypodError, RateLimitedError, TransientError, UnprovenError
from pennypod.ledger import AttemptRecord, AttemptState, Ledger, LedgerError
from pennypod.model.account import account_from
from pennypod.model.ids import parse_lease
from pennypod.model.meter import PodMeter, uncounted_words
from pennypod.model.money import format_usd, micros_to_usd
from pennypod.model.pod import Pod
from pennypod.proof import DestroyCalls, Proof, Sought, prove_all
from pennypod.providers.base import Provider
from pennypod.receipts import billed_seconds, gone_since, meter_document, total_micros
from pennypod.silence import Silence

Report = Callable[..., None]
"""`Events.emit`: stage, text, numbers."""

Release = Callable[[Sequence[AttemptRecord], Report], Iterable[AttemptRecord]]
"""`Escrow.release`: every attempt, each as soon as its pod may be destroyed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is to end, and why: an attempt of this ledger, or a pod with a lease of ours that it does not know."""

    target: AttemptRecord | Pod
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one: its receipt (None when no pod ever came of it), or why it is not proven gone.

    `unkept` is why a pod that is proven gone, and that no attempt is about, has a receipt which was neither sealed nor
    kept; an attempt without a kept receipt counts as not proven gone.
    """

    receipt: dict[str, Any] | None = None
    error: PennypodError | None = None
    unkept: PennypodError | None = None


class Endings:
    """Ends pods of one ledger. Holds no state of its own but, for a broken ledger, when it called destroy."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        ledger: Ledger,
        clock: Clock,
        *,
        chance: Callable[[], float] | None = None,
    ) -> None:
        self._providers = providers
        self._ledger = ledger
        self._clock = clock
        self._calls = DestroyCalls(ledger, clock) if chance is None else DestroyCalls(ledger, clock, chance=chance)

    def end_all(
        self, endings: Sequence[Ending], report: Report, patience_s: float, release: Release | None = None
    ) -> list[Ended]:
        """End pods and prove it, all at once. Safe to call from several processes for the same ones.

        Within `patience_s` seconds, and over the listing's lag for one whose create call was never answered. `release`
        says of attempts when each may end; nobody waits for another one's.
        """
        proofs: dict[int, Proof] = {}
        with contextlib.ExitStack() as stack:
            for name in sorted({ending.target.provider for ending in endings}):
                since = partial(_silent_since, proofs, name)
                stack.enter_context(Silence(name, since, partial(report, "teardown"), self._clock))
            return self._end_all(endings, proofs, report, patience_s, release)

    def _end_all(
        self,
        endings: Sequence[Ending],
        proofs: dict[int, Proof],
        report: Report,
        patience_s: float,
        release: Release | None,
    ) -> list[Ended]:
        results: dict[int, Ended] = {}
        for number in _in_order(endings, report, release):
            try:
                proof = self._begin(endings[number], report)
            except PennypodError as exc:
                results[number] = Ended(error=exc)
                continue
            if proof is None:
                results[number] = self._settled(endings[number])
            else:
                proofs[number] = proof
                proof.ask()
        prove_all(list(proofs.values()), self._clock, patience_s)
        for number, proof in proofs.items():
            results[number] = self._finish(endings[number], proof, report, patience_s)
        firsts = _places(endings)
        return [
            results[firsts[ending.target.id] if isinstance(ending.target, AttemptRecord) else number]
            for number, ending in enumerate(endings)
        ]

    def end(
        self, attempt: AttemptRecord, *, outcome: str, reason: str, report: Report, patience_s: float
    ) -> dict[str, Any] | None:
        """End one attempt; its receipt, or None when no pod ever came of it. Raises UnprovenError."""
        [ended] = self.end_all([Ending(attempt, outcome, reason)], report, patience_s)
        if ended.error is not None:
            raise ended.error
        return ended.receipt

    def find_by_name(self, provider: Provider, name: str) -> str | None:
        """Look a lost create up by its unique name, over the provider's listing lag. Raises when it cannot look."""
        waited = 0.0  # counted by what was slept: a clock that is set forward meanwhile shortens no lag
        failures = 0
        while True:
            try:
                match = [pod for pod in provider.pods() if pod.name == name]
                failures = 0
            except (TransientError, RateLimitedError):
                failures += 1
                match = []
            if match:
                return match[0].pod_id
            over_lag = waited >= provider.timing.listing_lag_s
            if over_lag and failures == 0:
                return None
            if over_lag and failures > 10:
                raise UnprovenError(
                    f"{provider.name} cannot be asked whether {name} exists: it may still be billing", name=name
                )
            pause = max(0.2, provider.timing.absence_spacing_s)
            self._clock.sleep(pause)
            waited += pause

    def adopt(self, attempt: AttemptRecord, pod_id: str) -> None:
        """Write down the id of a pod whose create call nobody has seen answered."""
        try:
            self._ledger.record_pod(attempt.id, pod_id, self._clock.now())
        except FencedError:
            return  # another actor wrote the same id first

    def settle(self, attempt: AttemptRecord) -> bool:
        """Find out what became of a create call whose caller is dead; returns whether there is a pod of it.

        The ledger knows then: the pod's id, or that there never was one.
        """
        if attempt.pod_id is None and not attempt.final:
            pod_id = self.find_by_name(provider := self._provider(attempt), attempt.lease_name)
            if pod_id is not None:
                self.adopt(attempt, pod_id)
            else:
                refuse_other_account(provider, attempt)
                why = "its renter died before the create call"
                with contextlib.suppress(FencedError):  # somebody else was quicker
                    self._ledger.record_never(attempt.id, "interrupted", why, self._clock.now())
        return not self._ledger.attempt(attempt.id).final

    def _begin(self, ending: Ending, report: Report) -> Proof | None:
        """Put the wish on record; None when there is nothing to end."""
        target = ending.target
        provider = self._provider(target)
        if isinstance(target, Pod):
            # A name without a lease need not be unique: another pod of that name must not count as this one.
            name = target.name if parse_lease(target.name) is not None else target.pod_id
            sought = Sought(provider, target.pod_id, name, target.price_micros_per_h, since=target.created)
            return Proof(sought, self._calls, self._clock)
        if target.final:
            return None
        pod_id = target.pod_id
        if pod_id is None:
            pod_id = self.find_by_name(provider, target.lease_name)
            if pod_id is None:
                refuse_other_account(provider, target)
                return self._settle_never(target, ending, report)
        else:
            refuse_other_account(provider, target)
        try:
            if target.pod_id is None:
                self.adopt(target, pod_id)
            self._ledger.record_destroying(target.id, ending.outcome, ending.reason, self._clock.now())
        except LedgerError as exc:
            # A full disk must not keep a pod alive. It stays on the books until its end can be written down.
            report("teardown", f"pod {short(pod_id)} is destroyed without a word in the ledger: {exc}", pod_id=pod_id)
        report("teardown", f"destroying pod {short(pod_id)}: {ending.reason}", pod_id=pod_id)
        sought = Sought(provider, pod_id, target.lease_name, target.price_micros_per_h, since=target.intended)
        return Proof(sought, self._calls, self._clock)

    def _settle_never(self, attempt: AttemptRecord, ending: Ending, report: Report) -> Proof | None:
        try:
            self._ledger.record_never(attempt.id, ending.outcome, ending.reason, self._clock.now())
        except FencedError:
            # Somebody else was quicker. A renter that wrote the pod's id: it is destroyed as any other.
            now = self._ledger.attempt(attempt.id)
            if now.pod_id is not None:
                return self._begin(Ending(now, ending.outcome, ending.reason), report)
        return None

    def _settled(self, ending: Ending) -> Ended:
        assert isinstance(ending.target, AttemptRecord)
        return Ended(self._ledger.attempt(ending.target.id).receipt)

    def _finish(self, ending: Ending, proof: Proof, report: Report, patience_s: float) -> Ended:
        if not proof.complete:
            return Ended(error=proof.unproven(patience_s))
        if isinstance(ending.target, Pod):
            receipt = receipt_of(_as_attempt(ending), proof, ending.reason)
            try:
                return Ended(self._ledger.record_stray(receipt))
            except PennypodError as exc:
                return Ended(receipt, unkept=exc)
        try:
            attempt, pod_id = self._ledger.attempt(ending.target.id), proof.sought.pod_id
            receipt = receipt_of(attempt, proof, attempt.reason or ending.reason)
            first = self._ledger.record_gone(attempt.id, receipt, receipt["gone_at"], int(receipt["cost_micros"]))
        except PennypodError as exc:
            return Ended(error=exc)
        if first:
            micros = int(receipt["cost_micros"])
            report(
                "teardown",
                f"pod {short(pod_id)} proven gone after {receipt['billed_seconds']:.0f} s, {format_usd(micros)}"
                + ("" if receipt["traffic_known"] else uncounted_words(attempt.traffic_counted)),
                pod_id=pod_id,
                gone=True,
                usd=micros_to_usd(micros),
            )
        return Ended(self._ledger.attempt(attempt.id).receipt)

    def _provider(self, target: AttemptRecord | Pod) -> Provider:
        provider = self._providers.get(target.provider)
        if provider is None:
            name = target.name if isinstance(target, Pod) else target.lease_name
            raise UnprovenError(
                f"{target.provider} is not configured here, so {name} cannot be ended:"
                " set its key; until then it may still be billing",
                provider=target.provider,
            )
        return provider


def _silent_since(proofs: Mapping[int, Proof], provider: str) -> float | None:
    """Since when none of the pods that a provider has left was heard of; several threads look at `proofs`."""
    left = [p.silent_since for p in list(proofs.values()) if p.sought.provider.name == provider and not p.complete]
    heard_nothing = [since for since in left if since is not None]
    return min(heard_nothing) if heard_nothing and len(heard_nothing) == len(left) else None


def _in_order(endings: Sequence[Ending], report: Report, release: Release | None) -> Iterator[int]:
    """Places in `endings`, those first whose end can be asked for first: looking a lost create up takes time."""
    places = _places(endings)
    yield from (n for n, ending in enumerate(endings) if isinstance(ending.target, Pod))
    targets = [endings[n].target for n in places.values()]
    attempts = sorted((t for t in targets if isinstance(t, AttemptRecord)), key=lambda attempt: attempt.pod_id is None)
    for attempt in attempts if release is None else release(attempts, report):
        yield places.pop(attempt.id)
    yield from places.values()


def _places(endings: Sequence[Ending]) -> dict[int, int]:
    """Where in `endings` each attempt is first; one that is there twice ends once."""
    places: dict[int, int] = {}
    for number, ending in enumerate(endings):
        if isinstance(ending.target, AttemptRecord):
            places.setdefault(ending.target.id, number)
    return places


def _as_attempt(ending: Ending) -> AttemptRecord:
    """A pod that the ledger does not know, as the attempt that it must have been by its own word."""
    pod = ending.target
    assert isinstance(pod, Pod)
    lease = parse_lease(pod.name)
    return AttemptRecord(
        id=0,
        run="" if lease is None else lease.run,
        attempt=0 if lease is None else lease.attempt,
        lease_name=pod.name,
        provider=pod.provider,
        offer_id="",
        machine_id=pod.machine_id,
        gpu=pod.gpu,
        gpu_count=pod.gpu_count,
        price_micros_per_h=pod.price_micros_per_h,
        renter="",
        state=AttemptState.DESTROYING,
        intended=pod.created,
        pod_id=pod.pod_id,
        rented=pod.created,
    )


def receipt_of(attempt: AttemptRecord, proof: Proof, reason: str) -> dict[str, Any]:
    """What the receipt of an attempt's pod says, by a complete proof. What must agree in it: `pennypod.receipts`."""
    meter = attempt.meter or PodMeter(attempt.price_micros_per_h, made=attempt.intended, computing=attempt.intended)
    receipt = {
        "run": attempt.run,
        "provider": attempt.provider,
        "pod_id": proof.sought.pod_id,
        "pod_name": attempt.lease_name,
        "machine_id": attempt.machine_id,
        "gpu": attempt.gpu,
        "reason": reason,
        "price_usd_per_h": micros_to_usd(attempt.price_now),
        "rented_at": attempt.intended,
        "gone_at": gone_since(proof.steps),
        "proven_at": proof.steps[-1]["at"],
        "meter": meter_document(meter),
        "traffic_known": attempt.traffic_known(proof.steps[-1]["at"]),
        "absence": proof.absence,
        "proof": proof.steps,
    }
    if attempt.account is not None:
        receipt["account"] = str(account_from(attempt.account))
    return {**receipt, "billed_seconds": billed_seconds(receipt), "cost_micros": total_micros(receipt)}


def short(pod_id: str) -> str:
    """Container engines have ids of 64 digits; twelve are plenty for people."""
    return pod_id[:12]
