"""What was accepted and what became of it. Floor 3: the orchestrator's tables are its one outside thing.

Every method is one transaction that is on disk when it returns: an answer of 202 is given after that, never before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from pennypod.errors import PennypodError
from pennypod.ledger.engine import open_engine
from pennypod.orchestrator import schema
from pennypod.orchestrator.payload import Order
from pennypod.orchestrator.problems import ProblemError
from pennypod.orchestrator.scheduling import Limits, Place, choose
from pennypod.orchestrator.signing import KEY_MEMORY_S, Delivery

WAITING, RUNNING, ENDED = "waiting", "running", "ended"
START, CANCEL = "start", "cancel"
STAGES = ("admit", "launch", "watch", "finish", "destroy", "report")
_MAX_TEXT = 2000
_LAST_WORDS = ("success", "failure")
# The number that PostgreSQL knows this lock by; beside those of the ledger, which are 4.
_CREATING = 0x70656E6E79 + 16
_GIVEN_UP = 0.0
# Who sends a notice has so long to say that it arrived, before somebody else sends it.
_NOTICE_CLAIM_S = 60.0


class StoreError(PennypodError):
    """The orchestrator's tables cannot be read or written: nothing is accepted meanwhile."""

    code = "store"


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted run."""

    run: str
    job: str
    provider: str
    regions: list[str]
    overrides: dict[str, Any]
    priority: int
    source: str
    callback_token: str = field(repr=False)
    received: float
    state: str
    stage: str
    worker: str | None = None
    admitted: float | None = None
    cancel_requested: float | None = None
    cancel_reason: str | None = None
    failure_code: str | None = None
    outcome: str | None = None
    reason: str | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a run's timeline."""

    run: str
    at: float
    kind: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    id: int
    run: str
    event: str
    recipient: str
    document: dict[str, Any]
    at: float
    due: float
    tries: int


@dataclass(frozen=True, slots=True)
class Start:
    """A checked delivery that asks for a run. `new_run` makes the run's id, should it be the first."""

    delivery: Delivery
    order: Order
    new_run: Callable[[], str]
    provider: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The run a delivery led to; `first` is false when the same delivery had led there before."""

    run: str
    first: bool


class Store:
    """All statements about requests. Safe to use from several threads and processes at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with self._transaction() as tx:
            if tx.dialect.name == "postgresql":  # of two that start at once, one makes the tables
                tx.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
            schema.metadata.create_all(tx)
        with self._transaction() as tx:
            if tx.execute(sa.select(schema.gate.c.id)).first() is None:
                with contextlib.suppress(IntegrityError), tx.begin_nested():
                    tx.execute(schema.gate.insert().values(id=1))

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except DBAPIError as exc:
            raise StoreError(f"the orchestrator's tables cannot be used: {exc.orig}") from exc

    # --- taking deliveries ----------------------------------------------------------------------------------------

    def take_starts(self, starts: Sequence[Start], limits: Limits, now: float) -> list[Taken | ProblemError]:
        """Accept runs, once per delivery, all in one transaction: one wait for the disk, however many they are.

        In the place of one that is refused is its ProblemError: replayed, idempotency_conflict, queue_full. That one
        leaves no trace, so it may be sent again as it is.
        """
        try:
            return self._take_starts(starts, limits, now)
        except IntegrityError:
            # A run's new id was there already, or a cancellation elsewhere has taken the same key: once more, alone.
            return [self._take_starts([start], limits, now)[0] for start in starts]

    def _take_starts(self, starts: Sequence[Start], limits: Limits, now: float) -> list[Taken | ProblemError]:
        results: list[Taken | ProblemError] = []
        requests, entries, deliveries = [], [], []
        with self._transaction() as tx:
            _pass_gate(tx)
            seen = _seen_before(tx, [start.delivery for start in starts], now)
            waiting = _count_waiting(tx)
            for start in starts:
                try:
                    before = _run_of(start.delivery, seen)
                    if before is None and waiting >= limits.queue:
                        raise ProblemError(
                            "queue_full", f"{waiting} runs are waiting already: try again later", retry_after_s=30.0
                        )
                except ProblemError as problem:
                    results.append(problem)
                    continue
                run = before or start.new_run()
                results.append(Taken(run, first=before is None))
                if before is None:
                    waiting += 1
                    requests.append(_request_row(start, run, now))
                    entries.append(_entry_row(run, now, "note", "accepted", f"by {start.delivery.source}"))
                    rows = _delivery_rows(start.delivery, run, START, now)
                    deliveries += rows
                    seen |= {(row["source"], row["key"]): _Seen(row["body_sha256"], run) for row in rows}
            if requests:
                tx.execute(schema.requests.insert(), requests)
                tx.execute(schema.timeline.insert(), entries)
                _insert_deliveries(tx, deliveries, now)
        return results

    def take_cancel(self, delivery: Delivery, run: str, *, job: str | None, now: float) -> Taken:
        """Accept a cancellation. Raises ProblemError: replayed, idempotency_conflict, unknown_run, run_over."""

        def write(tx: Connection) -> str:
            request = _request(tx, run)
            if job is not None and request.job != job:
                raise ProblemError("unknown_run", f"{run} is no run of job {job}")
            if request.state == ENDED:
                raise ProblemError("run_over", f"{run} is over: {request.outcome}", {"outcome": request.outcome})
            _cancel(tx, request, f"cancelled by {delivery.source}", now)
            return run

        return self._once(delivery, CANCEL, now, write)

    def _once(self, delivery: Delivery, action: str, now: float, write: Callable[[Connection], str]) -> Taken:
        for last_try in (False, True):
            try:
                with self._transaction() as tx:
                    before = _run_of(delivery, _seen_before(tx, [delivery], now))
                    if before is not None:
                        return Taken(before, first=False)
                    run = write(tx)
                    _insert_deliveries(tx, _delivery_rows(delivery, run, action, now), now)
                    return Taken(run, first=True)
            except IntegrityError:
                # The same delivery at the same moment, elsewhere: the second look finds it.
                if last_try:
                    raise
        raise AssertionError("not reached")

    def cancel(self, run: str, reason: str, now: float) -> None:
        """Ask for the end of a run, from our own page. Raises ProblemError: unknown_run, run_over."""
        with self._transaction() as tx:
            request = _request(tx, run)
            if request.state == ENDED:
                raise ProblemError("run_over", f"{run} is over: {request.outcome}", {"outcome": request.outcome})
            _cancel(tx, request, reason, now)

    def forget_old_deliveries(self, now: float) -> int:
        with self._transaction() as tx:
            table = schema.deliveries
            return int(tx.execute(table.delete().where(table.c.expires < now)).rowcount)

    # --- letting in -----------------------------------------------------------------------------------------------

    def admit(self, limits: Limits, worker: str, now: float) -> list[str]:
        """Let in whoever fits, for `worker` to carry out; nobody once that was given up by the others."""
        table = schema.requests
        with self._transaction() as tx:
            _pass_gate(tx)
            running = [_place(row) for row in tx.execute(_PLACES.where(table.c.state == RUNNING))]
            if len(running) >= limits.running or _was_given_up(tx, worker):
                return []
            # Locked, for a cancellation elsewhere may end one of them at this moment.
            query = _PLACES.where(table.c.state == WAITING).with_for_update()
            waiting = [_place(row) for row in tx.execute(query)]
            chosen = [place.run for place in choose(waiting, running, limits)]
            for run in chosen:
                _update(tx, run, state=RUNNING, worker=worker, admitted=now)
                _enter(tx, run, now, "stage", "admit", "let in")
            return chosen

    def running_of(self, worker: str) -> list[str]:
        table = schema.requests
        with self._transaction() as tx:
            query = sa.select(table.c.run).where(table.c.state == RUNNING, table.c.worker == worker)
            return list(tx.execute(query.order_by(table.c.received)).scalars())

    # --- carrying out -----------------------------------------------------------------------------------------------

    def enter_stage(self, run: str, stage: str, text: str, now: float) -> None:
        with self._transaction() as tx:
            _update(tx, run, stage=stage)
            _enter(tx, run, now, "stage", stage, text)

    def note(self, run: str, name: str, text: str, now: float) -> None:
        with self._transaction() as tx:
            _enter(tx, run, now, "note", name, text)

    def set_failure(self, run: str, code: str) -> None:
        with self._transaction() as tx:
            _update(tx, run, failure_code=code)

    def set_callback_token(self, run: str, digest: str) -> None:
        with self._transaction() as tx:
            _update(tx, run, callback_token=digest)

    def record_callback(self, run: str, event: str, text: str, now: float) -> None:
        with self._transaction() as tx:
            _enter(tx, run, now, "callback", event, text)

    def called_back(self, run: str) -> str | None:
        """How the training side says that it ended: "success", "failure", or None while it has not."""
        table = schema.timeline
        query = sa.select(table.c.name).where(
            table.c.run == run, table.c.kind == "callback", table.c.name.in_(_LAST_WORDS)
        )
        with self._transaction() as tx:
            return tx.execute(query.order_by(table.c.id).limit(1)).scalar()

    def wakes_since(self, entry_id: int) -> tuple[int, set[str]]:
        """Runs of which an end was told or asked for after that timeline entry; and the newest entry there is."""
        table = schema.timeline
        with self._transaction() as tx:
            newest = tx.execute(sa.select(sa.func.max(table.c.id))).scalar() or 0
            told = (table.c.kind == "callback") & table.c.name.in_(_LAST_WORDS)
            query = sa.select(table.c.run).where(table.c.id > entry_id, told | (table.c.kind == "cancel"))
            return int(newest), set(tx.execute(query).scalars())

    def end(self, run: str, outcome: str, reason: str, now: float) -> bool:
        """Write down the end of a run, once. Returns whether this call did."""
        with self._transaction() as tx:
            if _request(tx, run).state == ENDED:
                return False
            _update(tx, run, state=ENDED, stage="report", outcome=outcome, reason=reason[:_MAX_TEXT], ended=now)
            _enter(tx, run, now, "stage", "report", f"{outcome}: {reason}")
            return True

    # --- looking ----------------------------------------------------------------------------------------------------

    def request(self, run: str) -> Request:
        """Raises ProblemError unknown_run."""
        with self._transaction() as tx:
            return _request(tx, run)

    def requests(self, *states: str, limit: int = 200) -> list[Request]:
        """Newest first."""
        table = schema.requests
        query = sa.select(table).order_by(table.c.received.desc()).limit(limit)
        if states:
            query = query.where(table.c.state.in_(states))
        with self._transaction() as tx:
            return [_as_request(row) for row in tx.execute(query)]

    def counts(self) -> dict[str, int]:
        table = schema.requests
        with self._transaction() as tx:
            query = sa.select(table.c.state, sa.func.count()).group_by(table.c.state)
            return {state: int(number) for state, number in tx.execute(query)}

    def outcomes(self) -> dict[tuple[str, str], int]:
        """How many runs ended how, by (job, outcome)."""
        table = schema.requests
        query = sa.select(table.c.job, table.c.outcome, sa.func.count()).where(table.c.state == ENDED)
        with self._transaction() as tx:
            rows = tx.execute(query.group_by(table.c.job, table.c.outcome))
            return {(str(job), str(outcome)): int(number) for job, outcome, number in rows}

    def timeline(self, run: str) -> list[Entry]:
        table = schema.timeline
        columns = (table.c.run, table.c.at, table.c.kind, table.c.name, table.c.text)
        with self._transaction() as tx:
            query = sa.select(*columns).where(table.c.run == run).order_by(table.c.id)
            return [Entry(*row) for row in tx.execute(query)]

    # --- notices ----------------------------------------------------------------------------------------------------

    def add_notices(
        self, run: str, event: str, recipients: Sequence[str], document: Mapping[str, Any], now: float
    ) -> None:
        """One notice per event, run and recipient, however often it is asked for."""
        table = schema.notices
        with self._transaction() as tx:
            _pass_gate(tx)
            known = set(
                tx.execute(sa.select(table.c.recipient).where(table.c.run == run, table.c.event == event)).scalars()
            )
            for recipient in recipients:
                if recipient not in known:
                    tx.execute(
                        table.insert().values(
                            run=run,
                            event=event,
                            recipient=recipient,
                            document=dict(document),
                            at=now,
                            due=now,
                            tries=0,
                        )
                    )

    def due_notices(self, now: float, limit: int = 20) -> list[Notice]:
        """What is due, for the caller to send: nobody else is given it for a minute."""
        table = schema.notices
        query = sa.select(table).where(table.c.due <= now).order_by(table.c.due).limit(limit)
        with self._transaction() as tx:
            rows = tx.execute(query.with_for_update(skip_locked=True))
            due = [Notice(**dict(row._mapping)) for row in rows]  # noqa: SLF001 - as documented
            mine = table.c.id.in_([notice.id for notice in due])
            tx.execute(table.update().where(mine).values(due=now + _NOTICE_CLAIM_S))
            return due

    def notice_done(self, notice_id: int) -> None:
        """It stays as a row that is never due: the event must not be sent a second time."""
        self._set_due(notice_id, float("9e15"))

    def notice_again(self, notice_id: int, due: float) -> None:
        self._set_due(notice_id, due)

    def _set_due(self, notice_id: int, due: float) -> None:
        table = schema.notices
        with self._transaction() as tx:
            tx.execute(table.update().where(table.c.id == notice_id).values(due=due, tries=table.c.tries + 1))

    # --- orchestrators that share the work ----------------------------------------------------------------------------

    def beat(self, worker: str, now: float) -> bool:
        """Say that `worker` lives. Returns False once the others have given it up: it must do nothing more."""
        table = schema.workers
        with self._transaction() as tx:
            seen = _database_time(tx, now)
            lives = (table.c.worker == worker) & (table.c.seen != _GIVEN_UP)
            if tx.execute(table.update().where(lives).values(seen=seen)).rowcount:
                return True
            if _was_given_up(tx, worker):
                return False
            tx.execute(table.insert().values(worker=worker, seen=seen))
            return True

    def give_up(self, worker: str, silent_s: float, now: float, has_ended: Callable[[str], bool]) -> list[str]:
        """Give up all who have not been seen for `silent_s`, or of whom `has_ended` knows; returns their names."""
        table = schema.workers
        with self._transaction() as tx:
            _pass_gate(tx)
            oldest = _database_time(tx, now) - silent_s
            others = sa.select(table).where(table.c.worker != worker, table.c.seen != _GIVEN_UP)
            gone = [row.worker for row in tx.execute(others) if row.seen < oldest or has_ended(row.worker)]
            tx.execute(table.update().where(table.c.worker.in_(gone)).values(seen=_GIVEN_UP))
            return gone

    def take_ownerless(self, worker: str) -> tuple[list[str], set[str]]:
        """Make the running runs of nobody who lives those of `worker`: their ids, and who lives."""
        requests, workers = schema.requests, schema.workers
        with self._transaction() as tx:
            _pass_gate(tx)
            living = set(tx.execute(sa.select(workers.c.worker).where(workers.c.seen != _GIVEN_UP)).scalars())
            ownerless = (requests.c.state == RUNNING) & requests.c.worker.not_in(living)
            runs = list(tx.execute(sa.select(requests.c.run).where(ownerless)).scalars())
            tx.execute(requests.update().where(requests.c.run.in_(runs)).values(worker=worker))
            return runs, living

    def was_given_up(self, worker: str) -> bool:
        """Whether that is an orchestrator which has ended, as far as all who share this database are concerned."""
        with self._transaction() as tx:
            return _was_given_up(tx, worker)


def open_store(database_url: str) -> Store:
    """Raises StoreError when the database cannot be used."""
    try:
        return Store(open_engine(database_url))
    except (sa.exc.SQLAlchemyError, ImportError, OSError) as exc:
        raise StoreError(f"the orchestrator's tables cannot be opened: {exc}") from exc


# --- helpers over one connection --------------------------------------------------------------------------------------


def _pass_gate(tx: Connection) -> None:
    """One at a time from here to the end of the transaction, over all orchestrators."""
    tx.execute(sa.select(schema.gate.c.id).with_for_update()).first()


def _was_given_up(tx: Connection, worker: str) -> bool:
    table = schema.workers
    return tx.execute(sa.select(table.c.seen).where(table.c.worker == worker)).scalar() == _GIVEN_UP


def _database_time(tx: Connection, now: float) -> float:
    """By one clock for all who share the database: those of their machines may differ."""
    if tx.dialect.name == "postgresql":
        return float(tx.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))).scalar_one())
    return now


def _as_request(row: sa.Row[Any]) -> Request:
    return Request(**dict(row._mapping))  # noqa: SLF001 - SQLAlchemy's documented way


def _request(tx: Connection, run: str) -> Request:
    table = schema.requests
    row = tx.execute(sa.select(table).where(table.c.run == run).with_for_update()).first()
    if row is None:
        raise ProblemError("unknown_run", f"there is no run {run!r} here")
    return _as_request(row)


_PLACES = sa.select(*(schema.requests.c[name] for name in ("run", "job", "provider", "priority", "received")))


def _place(row: sa.Row[Any]) -> Place:
    return Place(row.run, row.job, row.provider, row.priority, row.received)


def _update(tx: Connection, run: str, **values: Any) -> None:
    tx.execute(schema.requests.update().where(schema.requests.c.run == run).values(**values))


def _enter(tx: Connection, run: str, now: float, kind: str, name: str, text: str) -> None:
    tx.execute(schema.timeline.insert(), _entry_row(run, now, kind, name, text))


def _entry_row(run: str, now: float, kind: str, name: str, text: str) -> dict[str, Any]:
    return {"run": run, "at": now, "kind": kind, "name": name, "text": text[:_MAX_TEXT]}


def _cancel(tx: Connection, request: Request, reason: str, now: float) -> None:
    """A waiting run ends here; a running one is told."""
    if request.cancel_requested is None:
        _update(tx, request.run, cancel_requested=now, cancel_reason=reason)
        _enter(tx, request.run, now, "cancel", "cancel", reason)
    if request.state == WAITING:
        _update(tx, request.run, state=ENDED, outcome="cancelled", reason=reason, ended=now)
        _enter(tx, request.run, now, "stage", "report", f"cancelled before anything was rented: {reason}")


@dataclass(frozen=True, slots=True)
class _Seen:
    body_sha256: str
    run: str


def _keys(delivery: Delivery) -> list[str]:
    """What a delivery is remembered by."""
    return [delivery.once] if delivery.key is None else [delivery.once, f"key:{delivery.key}"]


def _seen_before(tx: Connection, deliveries: Sequence[Delivery], now: float) -> dict[tuple[str, str], _Seen]:
    """All that may be known of these deliveries, by source and key."""
    table = schema.deliveries
    keys = [key for delivery in deliveries for key in _keys(delivery)]
    query = sa.select(table.c.source, table.c.key, table.c.body_sha256, table.c.run)
    rows = tx.execute(query.where(table.c.key.in_(keys), table.c.expires >= now))
    return {(row.source, row.key): _Seen(row.body_sha256, row.run) for row in rows}


def _run_of(delivery: Delivery, seen: Mapping[tuple[str, str], _Seen]) -> str | None:
    """The run that this delivery led to before, when it comes again under its idempotency key. Raises ProblemError."""
    once = seen.get((delivery.source, delivery.once))
    if once is not None:
        raise ProblemError(
            "replayed", "exactly this delivery was taken before; a new one needs a new signature", {"run": once.run}
        )
    known = None if delivery.key is None else seen.get((delivery.source, f"key:{delivery.key}"))
    if known is None:
        return None
    if known.body_sha256 != delivery.body_sha256:
        raise ProblemError(
            "idempotency_conflict", "this idempotency key came with another body before", {"run": known.run}
        )
    return known.run


def _delivery_rows(delivery: Delivery, run: str, action: str, now: float) -> list[dict[str, Any]]:
    return [
        {
            "source": delivery.source,
            "key": key,
            "body_sha256": delivery.body_sha256,
            "run": run,
            "action": action,
            "at": now,
            "expires": now + (delivery.once_for_s if key == delivery.once else KEY_MEMORY_S),
        }
        for key in _keys(delivery)
    ]


def _insert_deliveries(tx: Connection, rows: Sequence[Mapping[str, Any]], now: float) -> None:
    table = schema.deliveries
    # One that has expired may be in the way.
    tx.execute(table.delete().where(table.c.key.in_([row["key"] for row in rows]), table.c.expires < now))
    tx.execute(table.insert(), rows)


def _request_row(start: Start, run: str, now: float) -> dict[str, Any]:
    return {
        "run": run,
        "job": start.order.job,
        "provider": start.provider,
        "regions": list(start.order.regions),
        "overrides": dict(start.order.overrides),
        "priority": start.order.priority,
        "source": start.delivery.source,
        "callback_token": "",
        "received": now,
        "state": WAITING,
        "stage": "admit",
    }


def _count_waiting(tx: Connection) -> int:
    query = sa.select(sa.func.count()).where(schema.requests.c.state == WAITING)
    return int(tx.execute(query).scalar_one())
