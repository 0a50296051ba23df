"""Whether receipts hold: one document, several of them together, and a ledger's whole chain. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
