"""Whether the key in use sees an attempt's pod at all. Floor 2: the provider is passed in.

A pod that was rented with another account is missing from every view this one has. Taken for absence, that would prove
the end of a pod that bills on.
"""

from __future__ import annotations

from pennypod.errors import PennypodError, UnprovenError
from pennypod.ledger import AttemptRecord
from pennypod.model.account import Account, account_from
from pennypod.providers.base import Provider, TellsAccount


def account_of(provider: Provider) -> Account | None:
    """Whose pods this client sees, to be written down with an attempt. None where it cannot be told now."""
    if not isinstance(provider, TellsAccount):
        return None
    try:
        return Account(provider.key_mark(), provider.holder())
    except PennypodError:
        return None


def refuse_other_account(provider: Provider, attempt: AttemptRecord) -> None:
    """Raises UnprovenError when "not there", said by this client, would prove nothing about the attempt's pod.

    With the key that the attempt was made with, nobody is asked. With another one, the account's id decides, and where
    that is not told, the listing: who is shown the pod may judge its end.
    """
    if attempt.account is None or not isinstance(provider, TellsAccount):
        return  # written by a former version: nobody knows
    made_with = account_from(attempt.account)
    try:
        key = provider.key_mark()
    except PennypodError:
        return  # an engine that does not answer shows no pod, and an error is never taken for absence
    same = made_with.is_same(Account(key)) or made_with.is_same(Account(key, provider.holder()))
    if same or any(pod.name == attempt.lease_name for pod in provider.pods()):
        return
    pod = f"pod {attempt.pod_id[:12]}" if attempt.pod_id else f"what was rented as {attempt.lease_name}"
    of = f"of another one ({provider.holder()})" if same is False else "perhaps of another one"
    raise UnprovenError(
        f"{pod} was rented at {provider.name} by account {made_with}, and the key in use is {of}, which would not be"
        " shown it: set a key of the former; until then it may still be billing",
        pod_id=attempt.pod_id,
        provider=provider.name,
    )
