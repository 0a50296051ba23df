"""Reading and writing the ledger. Floor 1.

Every method is one transaction, committed (and, for SQLite, synced to disk) when it returns, so a kill -9 leaves either
the state before or the state after. SQLite is opened in WAL mode with an immediate write lock, which makes "check, then
write" safe between processes; on other databases the run's row is locked with SELECT ... FOR UPDATE.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from pennypod import processes
from pennypod.errors import FencedError, InputError, PennypodError
from pennypod.ledger import schema
from pennypod.ledger.commitments import committed
from pennypod.ledger.engine import open_engine
from pennypod.ledger.records import (
    FINAL_STATES,
    ArtifactRecord,
    AttemptRecord,
    AttemptState,
    Outcome,
    PassedOverRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    WeightsAtEnd,
    WeightsState,
)
from pennypod.ledger.upgrade import bring_up_to_date
from pennypod.model.account import Account
from pennypod.model.admission import DAY_S, Asked, Committed, admit
from pennypod.model.ids import Lease
from pennypod.model.offer import Offer
from pennypod.model.pod import SshAddress
from pennypod.receipts import GENESIS, Sealer, receipt_document
from pennypod.settings import Settings, home_advice

# Why a run was closed of which nobody knows whether it will be asked for again.
ABANDONED = "its command ended before anything was rented"


class LedgerError(PennypodError):
    """The ledger cannot be read or written; without it nothing may be rented."""

    code = "ledger"


def open_ledger(settings: Settings) -> Ledger:
    """Open (and on first use create) the ledger. Raises LedgerError with the place and what to do."""
    try:
        return Ledger(open_engine(settings.database_url), Sealer(settings.home))
    except (ArgumentError, NoSuchModuleError, ImportError) as exc:
        raise LedgerError(f"PENNYPOD_DATABASE_URL is not a usable SQLAlchemy URL: {exc}") from exc
    except OSError as exc:
        raise LedgerError(f"cannot make the ledger: {exc}; {home_advice(exc)}") from exc


class Ledger:
    """All statements about runs and attempts. Safe to use from several processes at once."""

    def __init__(self, engine: Engine, sealer: Sealer) -> None:
        self._engine = engine
        self.sealer = sealer
        self._ready = False

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            if not self._ready:
                self._create_tables()
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as exc:
            raise LedgerError(
                f"the ledger cannot be used: {exc.orig}; check PENNYPOD_HOME and free disk space"
            ) from exc

    def _create_tables(self) -> None:
        with self._engine.begin() as connection:
            refused = bring_up_to_date(connection)
        if refused is not None:
            raise LedgerError(
                f"the ledger has schema version {refused}, this pennypod knows up to {schema.SCHEMA_VERSION}:"
                " use the pennypod that wrote it, or point PENNYPOD_DATABASE_URL elsewhere"
            )
        self._ready = True

    # --- runs ---------------------------------------------------------------------------------------------------

    def open_run(self, record: RunRecord) -> None:
        """Write down a new run before anything else happens for it."""
        with self._transaction() as tx:
            tx.execute(schema.runs.insert().values(**_values(record)))

    def open_or_adopt_run(self, record: RunRecord, alive: Callable[[str], bool]) -> bool:
        """Write down a run whose id somebody else has chosen; returns whether it is new.

        Asked for again with the same id, it stays one run: `record.controller` takes it over as long as it has no pod
        and never had one that was usable, also when it was closed as abandoned meanwhile. Raises FencedError while its
        controller is alive and once it has a pod, was stopped or is over, and InputError when it is another job's.
        """
        with self._transaction() as tx:
            row = tx.execute(sa.select(schema.runs).where(schema.runs.c.run == record.run).with_for_update()).first()
            if row is None:
                tx.execute(schema.runs.insert().values(**_values(record)))
                return True
            before = RunRecord(**_columns(row))
            if before.job != record.job:
                raise InputError(f"run {record.run} is one of job {before.job}, not of {record.job}")
            if before.fenced_reason != ABANDONED:
                _refuse_fenced(before)
            if before.controller != record.controller and alive(before.controller):
                raise FencedError(
                    f"run {record.run} is being worked on by process {before.controller.partition(':')[0]}",
                    controller=before.controller,
                )
            if any(not attempt.final or attempt.ready is not None for attempt in _attempts(tx, record.run)):
                raise FencedError(f"run {record.run} has rented before: playbooks/resume.yml goes on with it")
            _update_run(
                tx,
                record.run,
                controller=record.controller,
                artifacts_dir=record.artifacts_dir,
                keep_on_disconnect=record.keep_on_disconnect,
                fenced_reason=None,
                outcome=None,
                reason=None,
                closed=None,
            )
            return False

    def set_plan(self, run: str, *, deadline: float, worst_case_micros: int) -> None:
        with self._transaction() as tx:
            _run(tx, run)
            _update_run(tx, run, deadline=deadline, worst_case_micros=worst_case_micros)

    def run(self, run: str) -> RunRecord:
        """One run. Raises InputError when the ledger has none of that id."""
        with self._transaction() as tx:
            return _run(tx, run)

    def runs(
        self, *, job: str | None = None, since: float | None = None, until: float | None = None
    ) -> list[RunRecord]:
        """Runs created in `[since, until)`, oldest first."""
        table = schema.runs
        query = sa.select(table).order_by(table.c.created, table.c.run)
        if job is not None:
            query = query.where(table.c.job == job)
        if since is not None:
            query = query.where(table.c.created >= since)
        if until is not None:
            query = query.where(table.c.created < until)
        with self._transaction() as tx:
            return [RunRecord(**_columns(row)) for row in tx.execute(query)]

    def open_runs(self, controller: str | None = None) -> list[RunRecord]:
        """Runs that are not closed, or that still have an attempt which is not proven over."""
        table = schema.runs
        pending = sa.select(schema.attempts.c.run).where(schema.attempts.c.state.not_in(FINAL_STATES))
        query = sa.select(table).where(sa.or_(table.c.closed.is_(None), table.c.run.in_(pending)))
        if controller is not None:
            query = query.where(table.c.controller == controller)
        with self._transaction() as tx:
            return [RunRecord(**_columns(row)) for row in tx.execute(query.order_by(table.c.created))]

    def take_over(
        self, run: str, controller: str, alive: Callable[[str], bool], *, keep_on_disconnect: bool | None = None
    ) -> RunRecord:
        """Make `controller` the one that works on the run, and return the run as it was before.

        Of two that try at once one gets it: the other then finds a controller that is alive. Raises FencedError when
        the run is over or was stopped, while its present controller is alive, and while something that controller left
        behind is still renting for it. `alive` judges a process by its identity. None keeps what the run said about
        `keep_on_disconnect`.
        """
        with self._transaction() as tx:
            before = _run(tx, run, lock=True)
            _refuse_fenced(before)
            if before.controller != controller:
                if alive(before.controller):
                    raise FencedError(
                        f"run {run} is still being worked on by process {before.controller.partition(':')[0]}:"
                        " there is nothing to resume while that is alive",
                        controller=before.controller,
                    )
                _refuse_while_renting(run, _attempts(tx, run), alive)
            keep = before.keep_on_disconnect if keep_on_disconnect is None else keep_on_disconnect
            _update_run(tx, run, controller=controller, keep_on_disconnect=keep)
            return before

    def fence(self, run: str, reason: str, *, controller: str | None = None) -> bool:
        """Take the run away from whoever works on it: from now on no attempt can be opened. Keeps the first reason.

        With `controller`, only while the run is that controller's. Returns whether the run is fenced now.
        """
        with self._transaction() as tx:
            record = _run(tx, run, lock=True)
            if controller is not None and record.controller != controller:
                return record.fenced_reason is not None
            if record.fenced_reason is None:
                _update_run(tx, run, fenced_reason=reason)
            return True

    def raise_if_fenced(self, run: str, controller: str | None = None) -> None:
        """Raises FencedError when the run was taken away or closed. Long steps call this every couple of seconds.

        With `controller`, a run that another controller has taken over counts as taken away.
        """
        with self._transaction() as tx:
            _refuse_fenced(_run(tx, run), controller)

    def close_run(self, run: str, outcome: Outcome, reason: str, at: float) -> bool:
        """Close a run once; a later close changes nothing. Returns whether this call closed it."""
        with self._transaction() as tx:
            if _run(tx, run, lock=True).closed is not None:
                return False
            _update_run(tx, run, outcome=outcome.value, reason=reason, closed=at)
            return True

    def record_weights_at_end(self, run: str, end: WeightsAtEnd) -> None:
        """Keep what became of the run's newest checkpoint. The first word stays, unless it was that it is lost."""
        with self._transaction() as tx:
            known = _run(tx, run, lock=True).weights_at_end
            if known is None or known.get("state") == WeightsState.LOST:
                _update_run(tx, run, weights_at_end=end.as_document())

    def set_verdict(self, run: str, verdict: str, note: str) -> None:
        """Record whether the result is used: "adopt" or "skip"."""
        with self._transaction() as tx:
            _run(tx, run)
            _update_run(tx, run, verdict=verdict, verdict_note=note)

    def close_abandoned(self, alive: Callable[[str], bool], at: float) -> list[str]:
        """Close the runs whose command ended before it rented anything; their ids. No pod can come of them any more.

        `alive` says yes of processes of other machines, which nobody can judge from here. In a ledger that machines may
        share, a controller that does not say where it runs, as former versions wrote it, is left alone as well.
        """
        shared = self._engine.dialect.name != "sqlite"
        judged = [run for run in self.open_runs() if processes.says_where(run.controller) or not shared]
        abandoned = [run for run in judged if not alive(run.controller) and not self.attempts(run.run)]
        closed = []
        for run in abandoned:
            # The fence comes first: should its command be alive after all, it can open no attempt from here on.
            if self.fence(run.run, ABANDONED, controller=run.controller) and not self.attempts(run.run):
                self.close_run(run.run, Outcome.CANCELLED, ABANDONED, at)
                closed.append(run.run)
        return closed

    # --- attempts -----------------------------------------------------------------------------------------------

    def open_attempt(
        self,
        lease: Lease,
        offer: Offer,
        *,
        renter: str,
        at: float,
        controller: str | None = None,
        lease_s: float = 0.0,
        asked: Asked | None = None,
        account: Account | None = None,
    ) -> AttemptRecord:
        """Journal the intent to rent. Raises FencedError when the run was taken away or already has a live attempt.

        With `asked`, raises BudgetError when the pod would break a cap, by all that is spent and committed at this
        moment: of two that are admitted at once, the second one sees the first.
        """
        with self._transaction() as tx:
            if asked is not None:
                _lock(tx, schema.ADMITTING)
            run = _run(tx, lease.run, lock=True)
            _refuse_fenced(run, controller)
            live = [attempt for attempt in _attempts(tx, lease.run) if not attempt.final]
            if live:
                raise FencedError(
                    f"run {lease.run} already has a pod that is not proven gone ({live[0].lease_name}): renting nothing"
                )
            allowance = None if asked is None else admit(asked, _committed(tx, run, offer.provider, at))
            tx.execute(
                schema.attempts.insert().values(
                    run=lease.run,
                    attempt=lease.attempt,
                    lease_name=lease.name,
                    provider=offer.provider,
                    offer_id=offer.offer_id,
                    machine_id=offer.machine_id,
                    region=offer.region,
                    gpu=offer.gpu,
                    gpu_count=offer.gpu_count,
                    price_micros_per_h=offer.price_micros_per_h,
                    disk_micros_per_h=offer.disk_micros_per_h,
                    traffic_in_micros_per_gb=offer.traffic_down_micros_per_gb,
                    traffic_out_micros_per_gb=offer.traffic_up_micros_per_gb,
                    worst_case_micros=None if asked is None else asked.worst_micros,
                    allowance_micros=allowance,
                    price_cap_micros_per_h=None if asked is None else asked.caps.price,
                    renter=renter,
                    state=AttemptState.INTENT.value,
                    intended=at,
                    lease_s=lease_s,
                    account=None if account is None else account.as_document(),
                )
            )
            return _attempts(tx, lease.run)[-1]

    def committed(self, run: str, provider: str, now: float) -> Committed:
        """What is spent and committed when `run` asks for one more pod at `provider`: to know, not to rely on."""
        with self._transaction() as tx:
            return _committed(tx, _run(tx, run), provider, now)

    def record_pod(self, attempt_id: int, pod_id: str, at: float) -> None:
        """The create call answered: keep the id before anything else is done with it."""
        self._advance(attempt_id, (AttemptState.INTENT,), AttemptState.RENTED, pod_id=pod_id, rented=at)

    def record_ready(self, attempt_id: int, address: SshAddress, at: float, *, host_key: str | None = None) -> None:
        self._advance(
            attempt_id,
            (AttemptState.RENTED, AttemptState.READY),
            AttemptState.READY,
            ready=at,
            ssh_host=address.host,
            ssh_port=address.port,
            ssh_user=address.user,
            host_key=host_key,
        )

    def record_image(self, attempt_id: int, reference: str, digest: str | None) -> None:
        """Keep what the pod was started from."""
        with self._transaction() as tx:
            _update_attempt(tx, attempt_id, image={"reference": reference, "digest": digest})

    def record_fuse(self, attempt_id: int, state: dict[str, Any]) -> None:
        """Keep what the pod said about its own fuse."""
        with self._transaction() as tx:
            _update_attempt(tx, attempt_id, fuse=state)

    def record_late(self, attempt_id: int, pod_id: str, at: float) -> None:
        """A create call was answered after its attempt had been given up as never: there is a pod, and it may bill."""
        with self._transaction() as tx:
            if _attempt(tx, attempt_id, lock=True).state is AttemptState.NEVER:
                _update_attempt(
                    tx,
                    attempt_id,
                    state=AttemptState.DESTROYING.value,
                    pod_id=pod_id,
                    rented=at,
                    destroy_requested=at,
                    gone=None,
                    estimated_micros=None,
                )

    def record_never(self, attempt_id: int, outcome: str, reason: str, at: float) -> None:
        """It is proven that the create call made nothing."""
        self._advance(
            attempt_id,
            (AttemptState.INTENT,),
            AttemptState.NEVER,
            outcome=outcome,
            reason=reason,
            gone=at,
            estimated_micros=0,
        )

    def record_destroying(self, attempt_id: int, outcome: str, reason: str, at: float) -> None:
        """Somebody asked for the end of the pod. The first reason stays: later askers only repeat it."""
        with self._transaction() as tx:
            attempt = _attempt(tx, attempt_id, lock=True)
            if attempt.final or attempt.state is AttemptState.DESTROYING:
                return
            _update_attempt(
                tx,
                attempt_id,
                state=AttemptState.DESTROYING.value,
                outcome=outcome,
                reason=reason,
                destroy_requested=at,
            )

    def record_gone(self, attempt_id: int, receipt: dict[str, Any], at: float, estimated_micros: int) -> bool:
        """Absence is proven: the receipt is sealed, chained and kept in the step that marks the attempt gone.

        Returns False when somebody else had already recorded it: their receipt stays.
        """
        with self._transaction() as tx:
            attempt = _attempt(tx, attempt_id, lock=True)
            if attempt.final:
                return False
            sealed = _append_receipt(tx, self.sealer, {"pod_name": attempt.lease_name, **receipt})
            _update_attempt(
                tx,
                attempt_id,
                state=AttemptState.GONE.value,
                gone=at,
                receipt=sealed,
                estimated_micros=estimated_micros,
            )
            return True

    def record_stray(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """The same for a pod that no attempt here is about; its sealed receipt, which is kept as a file, too."""
        with self._transaction() as tx:
            sealed = _append_receipt(tx, self.sealer, receipt)
        self.sealer.keep(
            str(sealed["pod_name"]), receipt_document(self.sealer, sealed["run"], [sealed], [], sealed["proven_at"])
        )
        return sealed

    def receipts(self) -> tuple[str, list[tuple[int, str, dict[str, Any]]]]:
        """The ledger's id and its chain of receipts: (seq, hash, sealed receipt), the first one first."""
        table = schema.receipts
        with self._transaction() as tx:
            rows = tx.execute(sa.select(table).order_by(table.c.seq)).all()
            return _ledger_id(tx), [(row.seq, row.hash, json.loads(row.document)) for row in rows]

    def claim_destroy(
        self, provider: str, pod_id: str, now: float, wait_s: Callable[[Sequence[float], float], float]
    ) -> float:
        """0 when the caller may call destroy now, which is then on record; else the seconds until somebody may.

        `wait_s` gets the times of the calls before, in their order, and `now`. Of two processes one gets the claim.
        """
        table = schema.destroy_calls
        same = (table.c.provider == provider) & (table.c.pod_id == pod_id)
        with self._transaction() as tx:
            _lock(tx, schema.DESTROYING)
            tx.execute(table.delete().where(same & (table.c.at <= now - 3600)))
            # A clock that was set back, or another machine's: counted as just now, lest it forbid every call till then.
            tx.execute(table.update().where(same & (table.c.at > now)).values(at=now))
            wait = wait_s(list(tx.execute(sa.select(table.c.at).where(same).order_by(table.c.id)).scalars()), now)
            if wait <= 0:
                tx.execute(table.insert().values(provider=provider, pod_id=pod_id, at=now))
            return max(0.0, wait)

    # --- what the meter counts ----------------------------------------------------------------------------------

    def record_look(self, attempt_id: int, *, computing: bool, since: float, at: float) -> AttemptRecord:
        """A look at a pod at `at` has shown that it does not compute before `since`, or that it computes since then.

        Once it was seen computing, that stays: a later look changes nothing.
        """
        with self._transaction() as tx:
            attempt = _attempt(tx, attempt_id, lock=True)
            if attempt.computing_seen is None and not attempt.final:
                start = max(since, attempt.intended, attempt.computing_from or 0.0)
                _update_attempt(tx, attempt_id, computing_from=start, computing_seen=at if computing else None)
            return _attempt(tx, attempt_id)

    def record_price(self, attempt_id: int, price_micros_per_h: int, since: float) -> AttemptRecord:
        """The provider asks another all-in price since then; from before the create call on, it is the only one."""
        with self._transaction() as tx:
            attempt = _attempt(tx, attempt_id, lock=True)
            if not attempt.final and attempt.price_now != price_micros_per_h:
                if since <= attempt.intended:
                    _update_attempt(tx, attempt_id, price_micros_per_h=price_micros_per_h, price_steps=None)
                else:
                    steps = [*(attempt.price_steps or []), [since, price_micros_per_h]]
                    _update_attempt(tx, attempt_id, price_steps=steps)
            return _attempt(tx, attempt_id)

    def add_traffic(self, run: str, *, sent: int, fetched: int) -> None:
        """Count bytes that went to the run's pod and came from it. Without a pod that is still ours, nothing."""
        with self._transaction() as tx:
            for attempt in _with_pod(tx, run):
                total_sent, total_fetched = (attempt.sent_bytes or 0) + sent, (attempt.fetched_bytes or 0) + fetched
                _update_attempt(tx, attempt.id, sent_bytes=total_sent, fetched_bytes=total_fetched)

    def record_traffic(self, run: str, *, sent: int, fetched: int, at: float) -> None:
        """All that the run's pod has received and sent by its own count at `at`, which starts anew when it does."""
        with self._transaction() as tx:
            for attempt in _with_pod(tx, run):
                most_sent, most_fetched = max(sent, attempt.sent_bytes or 0), max(fetched, attempt.fetched_bytes or 0)
                _update_attempt(tx, attempt.id, sent_bytes=most_sent, fetched_bytes=most_fetched, traffic_counted=at)

    def record_dataset(self, run: str, way: dict[str, Any]) -> None:
        """Keep how the data set came to the run's pod. Without a pod that is still ours, nothing."""
        with self._transaction() as tx:
            for attempt in _with_pod(tx, run):
                _update_attempt(tx, attempt.id, dataset=way)

    def record_isolation(self, run: str, state: dict[str, Any]) -> None:
        """Keep what the run's pod is held to. Without a pod that is still ours, nothing."""
        with self._transaction() as tx:
            for attempt in _with_pod(tx, run):
                _update_attempt(tx, attempt.id, isolation=state)

    def record_passed_over(self, record: PassedOverRecord) -> None:
        """An offer was not asked for, since it would have broken a limit."""
        with self._transaction() as tx:
            tx.execute(schema.passed_over.insert().values(**_values(record)))

    def passed_over(self, run: str) -> list[PassedOverRecord]:
        table = schema.passed_over
        with self._transaction() as tx:
            wanted = [column for column in table.columns if column.name != "id"]
            query = sa.select(*wanted).where(table.c.run == run).order_by(table.c.id)
            return [PassedOverRecord(**_columns(row)) for row in tx.execute(query)]

    # --- all attempts -------------------------------------------------------------------------------------------

    def attempts(self, run: str) -> list[AttemptRecord]:
        with self._transaction() as tx:
            return _attempts(tx, run)

    def attempt(self, attempt_id: int) -> AttemptRecord:
        """One attempt as it is on the books now."""
        with self._transaction() as tx:
            return _attempt(tx, attempt_id)

    def pending_attempts(self) -> list[AttemptRecord]:
        """Every attempt, of every run, that is not proven over: what may be billing by our own record."""
        table = schema.attempts
        query = sa.select(table).where(table.c.state.not_in(FINAL_STATES)).order_by(table.c.id)
        with self._transaction() as tx:
            return [_as_attempt(row) for row in tx.execute(query)]

    def attempts_since(self, since: float) -> list[AttemptRecord]:
        """Every attempt, of every run, that billed at some moment since then, or may bill now."""
        table = schema.attempts
        query = sa.select(table).where(sa.or_(table.c.gone.is_(None), table.c.gone >= since)).order_by(table.c.id)
        with self._transaction() as tx:
            return [_as_attempt(row) for row in tx.execute(query)]

    def _advance(self, attempt_id: int, expected: Sequence[AttemptState], to: AttemptState, **values: Any) -> None:
        with self._transaction() as tx:
            attempt = _attempt(tx, attempt_id, lock=True)
            if attempt.state not in expected:
                raise FencedError(
                    f"attempt {attempt.lease_name} is already {attempt.state.value}: another actor has taken it over"
                )
            _update_attempt(tx, attempt_id, state=to.value, **values)

    # --- stages, artifacts, quarantine --------------------------------------------------------------------------

    def start_stage(self, run: str, stage: str, at: float) -> None:
        """Begin a stage; beginning it again (a resume, the next rung) keeps the first start."""
        with self._transaction() as tx:
            _run(tx, run)
            table = schema.stages
            same = (table.c.run == run) & (table.c.stage == stage)
            if tx.execute(sa.select(table.c.run).where(same)).first() is None:
                tx.execute(table.insert().values(run=run, stage=stage, started=at))

    def finish_stage(self, run: str, stage: str, at: float) -> None:
        """End a stage. Those of a closed run stay as they are: its written results must go on saying the same."""
        with self._transaction() as tx:
            table = schema.stages
            if _run(tx, run).closed is not None:
                return
            tx.execute(table.update().where((table.c.run == run) & (table.c.stage == stage)).values(finished=at))

    def stages(self, run: str) -> list[StageRecord]:
        table = schema.stages
        with self._transaction() as tx:
            query = sa.select(table).where(table.c.run == run).order_by(table.c.started)
            return [StageRecord(**_columns(row)) for row in tx.execute(query)]

    def record_artifacts(self, records: Sequence[ArtifactRecord]) -> None:
        """Files that are home and verified; recording one again replaces it."""
        table = schema.artifacts
        with self._transaction() as tx:
            for record in records:
                tx.execute(table.delete().where((table.c.run == record.run) & (table.c.path == record.path)))
                tx.execute(table.insert().values(**_values(record)))

    def artifacts(self, run: str) -> list[ArtifactRecord]:
        table = schema.artifacts
        with self._transaction() as tx:
            query = sa.select(table).where(table.c.run == run).order_by(table.c.kind.desc(), table.c.path)
            return [ArtifactRecord(**_columns(row)) for row in tx.execute(query)]

    def quarantine(self, record: QuarantineRecord) -> None:
        table = schema.quarantine
        with self._transaction() as tx:
            tx.execute(
                table.delete().where((table.c.provider == record.provider) & (table.c.machine_id == record.machine_id))
            )
            tx.execute(table.insert().values(**_values(record)))

    def quarantined(self, now: float) -> list[QuarantineRecord]:
        table = schema.quarantine
        with self._transaction() as tx:
            query = sa.select(table).where(table.c.until > now).order_by(table.c.at)
            return [QuarantineRecord(**_columns(row)) for row in tx.execute(query)]


# --- helpers over one connection --------------------------------------------------------------------------------------


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _columns(row: sa.Row[Any]) -> dict[str, Any]:
    return dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's documented way, underscored so that no column can hide it


def _lock(tx: Connection, number: int) -> None:
    """One transaction at a time, for steps that are about no single row. SQLite has the write lock already."""
    if tx.dialect.name == "postgresql":
        tx.execute(sa.select(sa.func.pg_advisory_xact_lock(number)))


def _ledger_id(tx: Connection) -> str:
    """What this ledger's chain of receipts is called, made with its first one."""
    key = schema.meta.c.key == "ledger_id"
    found = tx.execute(sa.select(schema.meta.c.value).where(key)).scalar_one_or_none()
    if found is None:
        found = secrets.token_hex(8)
        tx.execute(schema.meta.insert().values(key="ledger_id", value=found))
    return str(found)


def _append_receipt(tx: Connection, sealer: Sealer, receipt: dict[str, Any]) -> dict[str, Any]:
    table = schema.receipts
    _lock(tx, schema.RECEIPTS)
    last = tx.execute(sa.select(table.c.seq, table.c.hash).order_by(table.c.seq.desc()).limit(1)).first()
    seq, previous = (1, GENESIS) if last is None else (last.seq + 1, last.hash)
    sealed = sealer.seal({**receipt, "chain": {"ledger": _ledger_id(tx), "seq": seq, "previous": previous}})
    tx.execute(
        table.insert().values(
            seq=seq,
            hash=sealed["seal"]["hash"],
            previous=previous,
            pod_name=sealed["pod_name"],
            document=json.dumps(sealed),
        )
    )
    return sealed


def _run(tx: Connection, run: str, *, lock: bool = False) -> RunRecord:
    query = sa.select(schema.runs).where(schema.runs.c.run == run)
    row = tx.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise InputError(f"the ledger has no run {run!r}: `pennypod ledger` lists them")
    return RunRecord(**_columns(row))


def _update_run(tx: Connection, run: str, **values: Any) -> None:
    tx.execute(schema.runs.update().where(schema.runs.c.run == run).values(**values))


def _refuse_fenced(record: RunRecord, controller: str | None = None) -> None:
    if record.fenced_reason is not None:
        raise FencedError(f"run {record.run} was stopped: {record.fenced_reason}")
    if record.closed is not None:
        raise FencedError(f"run {record.run} is already closed ({record.outcome})")
    if controller is not None and record.controller != controller:
        raise FencedError(f"run {record.run} was taken over by process {record.controller.partition(':')[0]}")


def _refuse_while_renting(run: str, attempts: Sequence[AttemptRecord], alive: Callable[[str], bool]) -> None:
    for attempt in attempts:
        if attempt.state in (AttemptState.INTENT, AttemptState.RENTED) and alive(attempt.renter):
            raise FencedError(
                f"run {run} is still being rented for by process {attempt.renter.partition(':')[0]}, which outlived its"
                " command: try again when that has ended",
                controller=attempt.renter,
            )


def _committed(tx: Connection, run: RunRecord, provider: str, now: float) -> Committed:
    runs, attempts = schema.runs, schema.attempts
    counts = sa.or_(
        runs.c.job == run.job,
        runs.c.closed.is_(None),
        attempts.c.state.not_in(FINAL_STATES),
        attempts.c.intended > now - DAY_S,
    )
    names = sa.select(attempts.c.run).join(runs, runs.c.run == attempts.c.run).where(counts).scalar_subquery()
    found = [RunRecord(**_columns(row)) for row in tx.execute(sa.select(runs).where(runs.c.run.in_(names)))]
    rows = tx.execute(sa.select(attempts).where(attempts.c.run.in_(names)).order_by(attempts.c.id))
    return committed(run, provider, found, [_as_attempt(row) for row in rows], now)


def _as_attempt(row: sa.Row[Any]) -> AttemptRecord:
    values = _columns(row)
    values["state"] = AttemptState(values["state"])
    return AttemptRecord(**values)


def _attempt(tx: Connection, attempt_id: int, *, lock: bool = False) -> AttemptRecord:
    query = sa.select(schema.attempts).where(schema.attempts.c.id == attempt_id)
    return _as_attempt(tx.execute(query.with_for_update() if lock else query).one())


def _attempts(tx: Connection, run: str) -> list[AttemptRecord]:
    table = schema.attempts
    return [_as_attempt(row) for row in tx.execute(sa.select(table).where(table.c.run == run).order_by(table.c.id))]


def _with_pod(tx: Connection, run: str) -> list[AttemptRecord]:
    """The run's attempts that have a pod which is not proven gone: one at most, but for what a crash has left."""
    _run(tx, run, lock=True)
    return [attempt for attempt in _attempts(tx, run) if not attempt.final and attempt.pod_id is not None]


def _update_attempt(tx: Connection, attempt_id: int, **values: Any) -> None:
    tx.execute(schema.attempts.update().where(schema.attempts.c.id == attempt_id).values(**values))
