"""The crash matrix as data: what may happen, when, who should end the pod then, and within which bound. Pure.

A cell is one event at one moment of one run. Cells are made from the two tables here; nothing is listed by hand. Times
are seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from pennypod.proof import LONGEST_PAUSE_S

# What the bounds are made of, as the matrix runs it. The guarantees' page states them for the default settings.
REACTION_S = 12.0
"""The guard sees its controller end at once; then it takes one call to destroy. A busy machine needs the rest."""
LISTING_LAG_S = 30.0
"""How long a fresh pod may be missing from a listing: so long a lost create is looked for by its name."""
SWEEP_INTERVAL_S = 5.0
SWEEP_TAKES_S = 10.0
"""From the start of one look to the destroy call, on a busy machine."""
GRACE_S = 10.0
"""What the jobs of the matrix give a checkpoint that is not home yet before its pod goes (escrow_grace_s)."""
SHORT_LEASE_S = 75.0
LONG_LEASE_S = 300.0
POD_LEASE_S = 45.0
"""pod_lease_minutes where nothing but the fuse is left: so long a pod lives without a word from the guard."""
FUSE_TAKES_S = 20.0
"""A pod may start a little after the event, and the fuse looks at its lease now and then."""
OUTAGE_S = 15.0
BACKOFF_S = 10.0 + LONGEST_PAUSE_S
"""The guard's longest pause between two looks, and the pace that all destroy calls for a pod keep together."""
NOTICE_S = 30.0
"""How long the jobs of the matrix put up with a pod that does not answer, and a little more."""


PROVIDERS = ("vast", "runpod")


class Moment(StrEnum):
    """Where a run is. Each is recognised by what the ledger says or the simulator was asked (moments.py)."""

    PLAN = "plan"
    BEFORE_CREATE = "before create"
    IN_CREATE = "in create"
    AFTER_ID = "after id"
    WAITING = "waiting"
    GATE = "gate"
    BOOTSTRAP = "bootstrap"
    DATASET = "dataset"
    TRAINING = "training"
    WEIGHTS = "weights"
    TEARDOWN = "teardown"


UNCERTAIN = frozenset({Moment.BEFORE_CREATE, Moment.IN_CREATE})
"""Nobody on the control side knows the pod's id, so it has to be found by its name."""
WITH_WEIGHTS = frozenset({Moment.TRAINING, Moment.WEIGHTS, Moment.TEARDOWN})
"""There may be a checkpoint to save before the pod goes."""
REACHABLE = frozenset({Moment.BOOTSTRAP, Moment.DATASET, Moment.TRAINING, Moment.WEIGHTS})
"""The pod is worked on over SSH."""


class Ring(StrEnum):
    PLAYBOOK = "0 playbook"
    GUARD = "1 guard"
    SWEEP = "2 sweep"
    FUSE = "3 fuse"


class Event(StrEnum):
    INT = "SIGINT"
    TERM = "SIGTERM"
    HUP = "SIGHUP"
    KILL = "SIGKILL"
    WORKER = "worker killed"
    GUARD = "guard killed"
    GUARD_TOO = "controller and guard killed"
    TREE = "everything killed"
    LOST = "control node lost"
    ALONE = "everything killed, nobody sweeps"
    SUSPENDED = "controller suspended"
    ASLEEP = "control node asleep"
    OUTAGE = "provider down"
    OUTAGE_KILL = "provider down and SIGKILL"
    UNREACHABLE = "pod unreachable"


@dataclass(frozen=True, slots=True)
class Rule:
    """What an event means: the moments it can happen at, the ring that is to answer, and the seconds that may take.

    `to_deadline`: nobody knows better than the deadline in the pod's name, so the rest of the lease comes on top.
    `sweeps`: a sweep from a timer is part of the picture; "elsewhere" is one on a machine with an empty home, and there
    the pod's own key does not work, so that ring 2 has to do it.
    """

    ring: Ring
    bound_s: float
    to_deadline: bool = False
    moments: tuple[Moment, ...] = tuple(Moment)
    sweeps: str = ""


_BY_SWEEP = SWEEP_INTERVAL_S + SWEEP_TAKES_S + LISTING_LAG_S
_IN_A_WORKER = tuple(moment for moment in Moment if moment not in UNCERTAIN)

RULES: dict[Event, Rule] = {
    Event.INT: Rule(Ring.GUARD, REACTION_S),
    Event.TERM: Rule(Ring.GUARD, REACTION_S),
    Event.HUP: Rule(Ring.GUARD, REACTION_S),
    Event.KILL: Rule(Ring.GUARD, REACTION_S),
    # The controller looks for dead workers every two seconds, ends, and the guard does the rest.
    Event.WORKER: Rule(Ring.GUARD, REACTION_S + 8.0, moments=_IN_A_WORKER),
    # Nothing is wrong with the run itself: it goes on and ends its pod, and else the sweep does at the deadline.
    Event.GUARD: Rule(Ring.PLAYBOOK, _BY_SWEEP, to_deadline=True, sweeps="here"),
    Event.GUARD_TOO: Rule(Ring.SWEEP, _BY_SWEEP, to_deadline=True, sweeps="here"),
    Event.TREE: Rule(Ring.SWEEP, _BY_SWEEP, to_deadline=True, sweeps="here"),
    Event.LOST: Rule(Ring.SWEEP, _BY_SWEEP, to_deadline=True, sweeps="elsewhere"),
    Event.ALONE: Rule(Ring.FUSE, POD_LEASE_S + FUSE_TAKES_S),
    Event.SUSPENDED: Rule(Ring.GUARD, REACTION_S, to_deadline=True),
    Event.ASLEEP: Rule(Ring.SWEEP, _BY_SWEEP, to_deadline=True, sweeps="elsewhere"),
    Event.OUTAGE: Rule(Ring.PLAYBOOK, _BY_SWEEP, to_deadline=True, sweeps="here"),
    Event.OUTAGE_KILL: Rule(Ring.GUARD, OUTAGE_S + BACKOFF_S + REACTION_S),
    Event.UNREACHABLE: Rule(Ring.PLAYBOOK, NOTICE_S + REACTION_S, moments=tuple(m for m in Moment if m in REACHABLE)),
}


# What a random kill of a victim has to be answered like, whatever the signal.
_LIKE = {
    "controller": Event.KILL,
    "worker": Event.WORKER,
    "guard": Event.GUARD,
    "controller and guard": Event.GUARD_TOO,
    "everything": Event.TREE,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the simulator that a whole run meets, and how its rule is set."""

    endpoint: str
    options: tuple[tuple[str, float], ...] = ()


# Faults of pods show only where there is a pod to log in to; those of calls are tried on ghosts, by the thousand.
POD_FAULTS: dict[str, Fault] = {
    "wrong_port": Fault("*.create", (("seconds", 8),)),
    "direct_blocked": Fault("vast.create"),
    "sshd_late": Fault("*.create", (("seconds", 10),)),
    "no_sshd": Fault("*.create"),
    "key_missing": Fault("*.create"),
    "bad_gpu": Fault("*.create"),
    "stuck_loading": Fault("*.create"),
    "pull_error": Fault("*.create"),
    "restart_loop": Fault("*.create"),
    "exit_after": Fault("*.create", (("seconds", 8),)),
    "evict_after": Fault("*.create", (("seconds", 8),)),
    "offline_after": Fault("*.create", (("seconds", 8),)),
    "list_lag": Fault("*.create", (("seconds", 15),)),
    "gone_lag": Fault("*.create", (("seconds", 8),)),
    "lost_reply": Fault("*.create", (("nth", 1),)),
    "error_after_commit": Fault("*.create", (("nth", 1),)),
    "destroy_noop": Fault("*.destroy", (("times", 2),)),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One event at one moment. `fault` is set where the event is one of the simulator's; `seed` draws the rest.

    A random kill says what is hit in `victim` and how long after the moment in `delay_s`.
    """

    event: str
    moment: str
    provider: str
    seed: int
    fault: str = ""
    victim: str = ""
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        if self.victim:
            return f"kill {self.seed}"
        return f"{self.event} / {self.moment} / {self.provider}"

    @property
    def group(self) -> str:
        """What the guarantees' table has a row for."""
        if self.victim:
            return f"random kill of {self.victim}"
        return f"fault {self.fault}" if self.fault else self.event

    @property
    def rule(self) -> Rule:
        if self.victim:
            return RULES[_LIKE[self.victim]]
        if self.fault:
            return Rule(Ring.PLAYBOOK, _BY_SWEEP, to_deadline=True, sweeps="here")
        return RULES[Event(self.event)]

    @property
    def lease_s(self) -> float:
        return SHORT_LEASE_S if self.rule.to_deadline else LONG_LEASE_S

    def bound_s(self, lease_left_s: float) -> float:
        """From the event to the meter's stop, at most. `lease_left_s` is what the lease had left at the event."""
        by_name = self.moment in UNCERTAIN and self.rule.ring is Ring.GUARD and not self.rule.to_deadline
        extra = LISTING_LAG_S if by_name else 0.0
        extra += GRACE_S if self.moment in WITH_WEIGHTS or self.fault or self.victim else 0.0
        return self.rule.bound_s + extra + (max(0.0, lease_left_s) if self.rule.to_deadline else 0.0)


def matrix() -> list[Cell]:
    """Every event at every moment it can happen at, and every fault of a pod. Providers take turns."""
    pairs = [(event, moment) for event, rule in RULES.items() for moment in rule.moments]
    cells = [Cell(event, moment, PROVIDERS[number % 2], seed=number) for number, (event, moment) in enumerate(pairs)]
    for number, (name, fault) in enumerate(POD_FAULTS.items()):
        provider = "vast" if fault.endpoint.startswith("vast") else PROVIDERS[(number + 1) % 2]
        cells.append(Cell(name, "start", provider, seed=1000 + number, fault=name))
    return cells


_SIGNALS = (Event.INT, Event.TERM, Event.HUP, Event.KILL)
_VICTIMS = tuple(_LIKE)


def random_kill(seed: int) -> Cell:
    """Signal, victim, moment and the time after it, all from one number."""
    chance = random.Random(seed)
    victim = chance.choice(_VICTIMS)
    signal = chance.choice(_SIGNALS)
    moment = chance.choice(_IN_A_WORKER if victim == "worker" else tuple(Moment))
    provider = chance.choice(PROVIDERS)
    return Cell(signal, moment, provider, seed, victim=victim, delay_s=round(chance.uniform(0.0, 3.0), 2))


def sample(seed: int, count: int) -> list[Cell]:
    """A few cells of the matrix with different events, none of which has to wait for a deadline."""
    chance = random.Random(seed)
    quick = [cell for cell in matrix() if not cell.rule.to_deadline]
    events = chance.sample(sorted({cell.event for cell in quick}), count)
    return [chance.choice([cell for cell in quick if cell.event == event]) for event in events]


def named(name: str) -> Cell:
    """The cell of that name, with or without its provider, or the random kill of that seed. Raises KeyError."""
    words = name.split()
    if len(words) == 2 and words[0] == "kill" and words[1].isdigit():
        return random_kill(int(words[1]))
    for cell in matrix():
        if name in (cell.name, f"{cell.event} / {cell.moment}"):
            return cell
        if name.startswith(f"{cell.event} / {cell.moment} / ") and name.rpartition(" / ")[2] in PROVIDERS:
            return replace(cell, provider=name.rpartition(" / ")[2])
    raise KeyError(name)
