"""Whether receipts hold: one document, alone or by its ledger, several together, a ledger's whole chain. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pennypod.receipts.content import content_problems
from pennypod.receipts.sealing import GENESIS, seal_problems

_DOCUMENT = {"run", "pods", "open", "written_at", "seal"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a receipt document is worth. `open` are pods that it does not call gone; `keys` whoever signed in it."""

    run: str
    pods: int
    problems: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    total_micros: int = 0
    at_least: bool = False  # some pod's last traffic is in no count


def check_document(document: Any, *, as_written: bool) -> Finding:
    """A receipt.json, offline: every seal, hash and word of it. `as_written` is what `read_document` says."""
    if not isinstance(document, dict) or set(document) != _DOCUMENT:
        return Finding("", 0, ["this is no receipt"])
    run, pods, open_ones = document["run"], document["pods"], document["open"]
    shape = isinstance(run, str) and isinstance(pods, list) and all(isinstance(pod, dict) for pod in pods)
    if not shape or not isinstance(open_ones, list) or not all(isinstance(name, str) for name in open_ones):
        return Finding("", 0, ["this is no receipt"])
    if not isinstance(document["written_at"], int | float):
        return Finding("", 0, ["this is no receipt"])
    problems = [] if as_written else ["the file is not as it was written, byte for byte"]
    problems += [f"the document: {problem}" for problem in seal_problems(document)]
    for number, pod in enumerate(pods, start=1):
        found = [*seal_problems(pod), *_chain_shape(pod), *content_problems(pod)]
        if pod.get("run") != run:
            found.append("it is of another run")
        problems += [f"pod {number}: {problem}" for problem in found]
    keys = [document, *pods]
    return Finding(
        run,
        len(pods),
        problems,
        open=list(open_ones),
        keys=sorted({str(item["seal"].get("public_key")) for item in keys if isinstance(item.get("seal"), dict)}),
        total_micros=0 if problems else sum(int(pod["cost_micros"]) for pod in pods),
        at_least=not problems and not all(pod.get("traffic_known", True) for pod in pods),
    )


@dataclass(frozen=True, slots=True)
class KnownPod:
    """What a ledger holds of one pod of a run. `receipt` is its receipt's hash, None while it has none, "" unsealed."""

    name: str
    intended: float
    open: bool
    receipt: str | None = None
    proven: float = 0.0


def check_against_ledger(
    document: Mapping[str, Any],
    ledger: str,
    rows: Sequence[tuple[int, str, Mapping[str, Any]]],
    known: Sequence[KnownPod],
    keys: Set[str],
) -> list[str]:
    """What a ledger that knows the run or its pods says against a document that holds by itself.

    `rows` are the ledger's chain, `known` its pods of that run, `keys` those that are believed. Of what the ledger has
    learnt after the document was written it may say nothing: that is an older copy.
    """
    pods, at = document["pods"], document["written_at"]
    found = []
    if strange := sorted({_signer(item) for item in (document, *pods)} - keys):
        found.append(
            f"it is signed with {', '.join(strange)}, and neither this home nor its ledger signs with that key"
        )
    places = {seq: row_hash for seq, row_hash, _ in rows}
    for pod in pods:
        chain = pod["chain"]
        if chain["ledger"] != ledger or places.get(chain["seq"]) != pod["seal"]["hash"]:
            found.append(f"{pod['pod_name']}: the ledger has no such receipt at place {chain['seq']}")
    chained, told = set(places.values()), {pod["seal"]["hash"] for pod in pods}
    found += [
        f"{pod.name}: the ledger calls it gone, and its chain has no receipt for that"
        for pod in known
        if pod.receipt is not None and pod.receipt not in chained
    ]
    if pods and told.isdisjoint(pod.receipt for pod in known):
        return found  # the receipt of a pod that was swept without being on the books: it has a file of its own
    found += [
        f"{pod.name}: the ledger has a receipt of this pod, and the file does not"
        for pod in known
        if pod.receipt and pod.receipt not in told and pod.proven <= at
    ]
    found += [
        f"{pod.name}: the ledger does not call this pod gone, and the file does not name it"
        for pod in known
        if pod.open and pod.intended <= at and pod.name not in document["open"]
    ]
    return found


def signers(rows: Iterable[tuple[int, str, Mapping[str, Any]]]) -> set[str]:
    """The public keys that signed in a ledger's chain."""
    return {_signer(receipt) for _, _, receipt in rows} - {""}


def _signer(sealed: Mapping[str, Any]) -> str:
    seal = sealed.get("seal")
    return str(seal.get("public_key")) if isinstance(seal, dict) else ""


def _chain_shape(pod: Mapping[str, Any]) -> list[str]:
    chain = pod.get("chain")
    if (
        isinstance(chain, dict)
        and set(chain) == {"ledger", "seq", "previous"}
        and isinstance(chain["seq"], int)
        and chain["seq"] >= 1
        and isinstance(chain["ledger"], str)
        and isinstance(chain["previous"], str)
    ):
        return []
    return ["it names no place in a ledger's chain"]


def check_together(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """What does not hold between the receipts of documents that hold each: one place in a chain is one receipt."""
    places: dict[tuple[str, int], Mapping[str, Any]] = {}
    found = []
    for document in documents:
        seen: set[tuple[str, int]] = set()
        for pod in document["pods"]:
            place = (pod["chain"]["ledger"], pod["chain"]["seq"])
            if place in seen:
                found.append(f"{pod['pod_name']}: it is there twice")
            seen.add(place)
            other = places.setdefault(place, pod)
            if other["seal"]["hash"] != pod["seal"]["hash"]:
                found.append(f"{pod['pod_name']}: {other['pod_name']} has the same place in the ledger's chain")
    for (ledger, seq), pod in sorted(places.items()):
        before = places.get((ledger, seq - 1))
        if before is not None and pod["chain"]["previous"] != before["seal"]["hash"]:
            found.append(f"{pod['pod_name']}: the receipt before it in the ledger's chain is another one")
    return found


def check_chain(ledger: str, rows: Sequence[tuple[int, str, Mapping[str, Any]]]) -> list[str]:
    """A ledger's own chain, from rows of (seq, hash, receipt) ordered by seq: nothing missing, moved or changed."""
    found = []
    previous = GENESIS
    for expected, (seq, row_hash, receipt) in enumerate(rows, start=1):
        if seq != expected:
            found.append(f"receipt {expected} of the ledger is missing")
            break
        name = str(receipt.get("pod_name"))
        chain, seal = receipt.get("chain"), receipt.get("seal")
        if not isinstance(chain, dict) or not isinstance(seal, dict):
            found.append(f"receipt {seq} of the ledger ({name}): it carries no seal")
            break
        problems = seal_problems(receipt)
        if chain != {"ledger": ledger, "seq": seq, "previous": previous} or seal.get("hash") != row_hash:
            problems.append("its place in the chain is another one")
        found += [f"receipt {seq} of the ledger ({name}): {problem}" for problem in problems]
        previous = row_hash
    return found
