"""`pennypod verify`: whether receipts hold, for whoever has them. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import FAILED, MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.errors import InputError, PennypodError
from pennypod.model.ids import is_run_id
from pennypod.model.money import format_usd, micros_to_usd

if TYPE_CHECKING:
    from pennypod.receipts import Finding, KnownPod

    Checked = tuple[Finding, dict[str, Any]]
    """A document that holds by itself, and what was found of it."""

RECEIPT_FILE = "receipt.json"
_NO_PATH = re.compile(r"[A-Za-z0-9_-]+")


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="RECEIPT...")
@click.option("--public-key", "keys", multiple=True, metavar="KEY", help="Whose receipts to believe: hex, or a file.")
@click.option("--offline", is_flag=True, help="Look at nothing but the files, even where their ledger is at hand.")
@json_option
@pass_app
def verify(app: App, targets: tuple[str, ...], keys: tuple[str, ...], offline: bool, as_json: bool) -> int:
    """Check receipts: every signature, hash, time, step of proof and total.

    RECEIPT is a receipt.json, an artifacts folder, or the id of a run. Needs no account and no ledger; where the ledger
    that wrote them is at hand, its chain is checked as well: that none is missing, moved or changed. A receipt of a run
    that it knows must be signed by this home, or by one that shares the ledger, and tell of the same pods. Says whose
    key signed: this home's own, one given with --public-key, one that signs in the ledger at hand, or one unknown here,
    which anybody could have made.

    Exit code 0 when all hold, 1 when one does not or was signed by another key than those given, 3 when all hold but
    name a pod that is not proven gone.
    """
    from pennypod.receipts import Finding, check_document, check_together, read_document

    trusted = {_public_key(text) for text in keys}
    findings: list[tuple[str, Finding]] = []
    checked: list[Checked] = []
    for target in targets:
        try:
            path = _file_of(app, target)
        except InputError as exc:
            findings.append((target, Finding("", 0, [exc.message])))
            continue
        try:
            document, as_written = read_document(path)
        except (OSError, ValueError) as exc:
            findings.append((str(path), Finding("", 0, [f"it cannot be read: {exc}"])))
            continue
        finding = check_document(document, as_written=as_written)
        if trusted and not set(finding.keys) <= trusted:
            finding.problems.append("it is signed by another key than those given")
        findings.append((str(path), finding))
        if not finding.problems:
            checked.append((finding, document))
    together = check_together(document for _, document in checked)
    own = _own_key(app)
    believed = {*trusted, *([own] if own else [])}
    ledger = Looked([], "not looked at") if offline else _check_ledger(app, checked, believed)
    chain, told = ledger.problems, ledger.told
    known = {**dict.fromkeys(ledger.keys, "ledger"), **({own: "own"} if own else {}), **dict.fromkeys(trusted, "given")}
    whose = {key: known.get(key, "unknown") for _, finding in findings for key in finding.keys}
    failed = any(finding.problems for _, finding in findings) or bool(together or chain)
    still_open = sorted({name for _, finding in findings for name in finding.open})
    if as_json:
        app.print_json(
            {
                "ok": not failed,
                "receipts": [_as_document(place, finding, whose) for place, finding in findings],
                "together": together,
                "chain": {"checked": told, "problems": chain},
                "may_still_be_billing": still_open,
            }
        )
    else:
        for problem in (*together, *chain):
            click.echo(f"NO   {problem}")
        for place, finding in findings:
            _print(place, finding, whose)
        click.echo(f"the ledger's chain: {told}")
    for name in still_open:
        app.say(f"may still be billing: {name} was not proven gone when this was written")
    return FAILED if failed else MAY_STILL_BILL if still_open else OK


def _file_of(app: App, target: str) -> Path:
    """The file that is meant. Raises InputError for what can only be the id of a run, and of none that is known."""
    path = Path(target)
    if path.is_dir():
        return path / RECEIPT_FILE
    if not _NO_PATH.fullmatch(target) or path.exists():
        return path
    file = app.settings.ledger_file
    if file is not None and not file.exists():
        raise InputError("there is no such file, and no ledger here that could know such a run")
    try:
        return Path(app.ledger.run(target).artifacts_dir) / RECEIPT_FILE
    except InputError as exc:
        raise InputError("the ledger has no such run, and there is no such file: `pennypod ledger` lists runs") from exc


def _public_key(text: str) -> str:
    """A key given as hex or as a file that holds it."""
    path = Path(text)
    given = text
    try:
        if path.is_file():
            given = path.read_text(encoding="ascii")
    except (OSError, ValueError) as exc:
        raise InputError(f"the public key {text} cannot be read: {exc}") from exc
    given = given.strip()
    if not re.fullmatch(r"[0-9a-f]{64}", given):
        raise InputError(f"{text[:80]} is no public key: 64 hexadecimal digits, or a file that holds them")
    return given


def _own_key(app: App) -> str | None:
    from pennypod.receipts import ReceiptError, Sealer

    try:
        return Sealer(app.settings.home).public_key
    except ReceiptError:
        return None


@dataclass(frozen=True, slots=True)
class Looked:
    """What is wrong with the chain of the ledger at hand, a word on what was looked at, who signed in that chain."""

    problems: list[str]
    told: str
    keys: frozenset[str] = frozenset()


def _check_ledger(app: App, checked: Sequence[Checked], keys: set[str]) -> Looked:
    """The ledger at hand, and what it holds of the receipts.

    What the ledger says against one of the receipts goes to that one's finding. `keys` are believed, and
    those that signed in its chain: several homes may share one ledger, and a home may have been given a new key.
    """
    from pennypod.receipts import check_against_ledger, check_chain, signers

    file = app.settings.ledger_file
    if file is not None and not file.exists():
        return Looked([], "there is no ledger here")
    try:
        ledger, rows = app.ledger.receipts()
        known = {run: _known_pods(app, run) for run in {document["run"] for _, document in checked}}
    except PennypodError as exc:
        return Looked([], f"the ledger here cannot be read: {exc}")
    ours = [
        (finding, document)
        for finding, document in checked
        if known[document["run"]] is not None or any(pod["chain"]["ledger"] == ledger for pod in document["pods"])
    ]
    if checked and not ours:
        return Looked([], "these receipts are from another ledger than the one here")
    signed = signers(rows)
    for finding, document in ours:
        pods = known[document["run"]] or []
        finding.problems.extend(check_against_ledger(document, ledger, rows, pods, signed | keys))
    problems = check_chain(ledger, rows)
    sound = not problems and not any(finding.problems for finding, _ in ours)
    told = f"{len(rows)} receipts, every one in its place" if sound else f"{len(rows)} receipts"
    return Looked(problems, told, frozenset(signed))


def _known_pods(app: App, run: str) -> list[KnownPod] | None:
    """The pods that the ledger has on its books for a run; None when it does not know the run."""
    from pennypod.receipts import KnownPod

    if not is_run_id(run):
        return None
    attempts = app.ledger.attempts(run)
    if not attempts:
        try:
            app.ledger.run(run)
        except InputError:
            return None
    pods = []
    for attempt in attempts:
        pod = KnownPod(attempt.lease_name, attempt.intended, not attempt.final)
        if attempt.receipt is not None:
            sealed = str((attempt.receipt.get("seal") or {}).get("hash") or "")
            pod = replace(pod, receipt=sealed, proven=float(attempt.receipt.get("proven_at") or 0.0))
        pods.append(pod)
    return pods


def _as_document(path: str, finding: Finding, whose: dict[str, str]) -> dict[str, Any]:
    return {
        "file": path,
        "ok": not finding.problems,
        "run": finding.run or None,
        "pods": finding.pods,
        "total_usd": micros_to_usd(finding.total_micros),
        "traffic_known": not finding.at_least,
        "problems": finding.problems,
        "keys": [{"public_key": key, "whose": whose[key]} for key in finding.keys],
    }


def _print(path: str, finding: Finding, whose: dict[str, str]) -> None:
    if finding.problems:
        for problem in finding.problems:
            click.echo(f"NO   {path}: {problem}")
        return
    total = f"{'at least ' if finding.at_least else ''}{format_usd(finding.total_micros)}"
    click.echo(f"yes  {path}: {finding.run}: {finding.pods} pod{'' if finding.pods == 1 else 's'} proven gone, {total}")
    words = {
        "own": "this home's own",
        "given": "the one given",
        "ledger": "one that signs in the ledger here",
        "unknown": "unknown here, anybody could have made it",
    }
    for key in finding.keys:
        click.echo(f"     signed with {key} ({words[whose[key]]})")
