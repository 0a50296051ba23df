"""`pennypod verify`: whether receipts hold, for whoever has them. Floor 3."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import FAILED, MAY_STILL_BILL, OK, App, json_option, pass_app
from pennypod.errors import InputError, PennypodError
from pennypod.model.ids import is_run_id
from pennypod.model.money import format_usd, micros_to_usd

if TYPE_CHECKING:
    from pennypod.receipts import Finding

RECEIPT_FILE = "receipt.json"


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="RECEIPT...")
@click.option("--public-key", "keys", multiple=True, metavar="KEY", help="Whose receipts to believe: hex, or a file.")
@click.option("--offline", is_flag=True, help="Look at nothing but the files, even where their ledger is at hand.")
@json_option
@pass_app
def verify(app: App, targets: tuple[str, ...], keys: tuple[str, ...], offline: bool, as_json: bool) -> int:
    """Check receipts: every signature, hash, time, step of proof and total.

    RECEIPT is a receipt.json, an artifacts folder, or the id of a run. Needs no account and no ledger; where the ledger
    that wrote them is at hand, its chain is checked as well: that none is missing, moved or changed. Says whose key
    signed: this home's own, one given with --public-key, or one unknown here, which anybody could have made.

    Exit code 0 when all hold, 1 when one does not or was signed by another key than those given, 3 when all hold but
    name a pod that is not proven gone.
    """
    from pennypod.receipts import Finding, check_document, check_together, read_document

    trusted = {_public_key(text) for text in keys}
    findings: list[tuple[str, Finding]] = []
    documents = []
    for target in targets:
        path = _file_of(app, target)
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
            documents.append(document)
    together = check_together(documents)
    chain, told = ([], "not looked at") if offline else _check_ledger(app, documents)
    own = _own_key(app)
    whose = {
        key: "given" if key in trusted else "own" if key == own else "unknown" for _, f in findings for key in f.keys
    }
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
        for place, finding in findings:
            _print(place, finding, whose)
        for problem in (*together, *chain):
            click.echo(f"NO   {problem}")
        click.echo(f"the ledger's chain: {told}")
    for name in still_open:
        app.say(f"may still be billing: {name} was not proven gone when this was written")
    return FAILED if failed else MAY_STILL_BILL if still_open else OK


def _file_of(app: App, target: str) -> Path:
    path = Path(target)
    if path.is_dir():
        return path / RECEIPT_FILE
    if is_run_id(target) and not path.exists():
        return Path(app.ledger.run(target).artifacts_dir) / RECEIPT_FILE
    return path


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


def _check_ledger(app: App, documents: list[dict[str, Any]]) -> tuple[list[str], str]:
    """What the ledger at hand says against the receipts, and a word on what was looked at."""
    from pennypod.receipts import check_chain

    file = app.settings.ledger_file
    if file is not None and not file.exists():
        return [], "there is no ledger here"
    try:
        ledger, rows = app.ledger.receipts()
    except PennypodError as exc:
        return [], f"the ledger here cannot be read: {exc}"
    ours = [pod for document in documents for pod in document["pods"] if pod["chain"]["ledger"] == ledger]
    if documents and not ours:
        return [], "these receipts are from another ledger than the one here"
    hashes = {seq: row_hash for seq, row_hash, _ in rows}
    problems = check_chain(ledger, rows)
    problems += [
        f"{pod['pod_name']}: the ledger has no such receipt at place {pod['chain']['seq']}"
        for pod in ours
        if hashes.get(pod["chain"]["seq"]) != pod["seal"]["hash"]
    ]
    chained = {row_hash for _, row_hash, _ in rows}
    problems += [
        f"{attempt.lease_name}: the ledger calls it gone, and its chain has no receipt for that"
        for document in documents
        for attempt in app.ledger.attempts(document["run"])
        if attempt.receipt is not None and (attempt.receipt.get("seal") or {}).get("hash") not in chained
    ]
    return problems, f"{len(rows)} receipts, every one in its place" if not problems else f"{len(rows)} receipts"


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
    click.echo(f"yes  {path}: {finding.run}: {finding.pods} pods proven gone, {total}")
    words = {"own": "this home's own", "given": "the one given", "unknown": "unknown here, anybody could have made it"}
    for key in finding.keys:
        click.echo(f"     signed with {key} ({words[whose[key]]})")
