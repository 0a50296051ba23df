"""Our Vast requests beside those that the official client (vastai 1.9.1) was recorded to send for the same intent.

Every difference is deliberate and listed here with its reason.
"""

from __future__ import annotations

from typing import Any

from pennypod.model.ids import Lease
from pennypod.model.offer import Need, Offer, Order
from pennypod.providers.vast import create_body, search_body

LEASE = Lease("demo-1201-abcde", 1, 1_764_610_000, "abcde").name

# vastai create instance 4242 --image I --disk 60 --ssh --direct --label L --env '-e A=b'
OFFICIAL_CREATE: dict[str, Any] = {
    "client_id": "me",
    "image": "I",
    "env": {"A": "b"},
    "price": None,
    "disk": 60.0,
    "label": LEASE,
    "extra": None,
    "onstart": None,
    "image_login": None,
    "python_utf8": False,
    "lang_utf8": False,
    "use_jupyter_lab": False,
    "jupyter_dir": None,
    "force": False,
    "cancel_unavail": False,
    "template_hash_id": None,
    "user": None,
    "runtype": "ssh_direc ssh_proxy",
}
CREATE_DIFFERENCES = {
    "cancel_unavail": "an unavailable machine must not leave a stopped instance that bills for its disk",
    "onstart": "no tmux around logins, and the run's key is let in from the first second",
    "target_state": "the default, said aloud",
}

# vastai search offers 'gpu_name=RTX_3090 reliability>0.98 inet_down>200 disk_space>60' -o dph_total
QUERY = "gpu_name=RTX_3090 reliability>0.98 inet_down>200 disk_space>60"
OFFICIAL_SEARCH: dict[str, Any] = {
    "verified": {"eq": True},
    "external": {"eq": False},
    "rentable": {"eq": True},
    "gpu_name": {"eq": "RTX 3090"},
    "reliability": {"gt": "0.98"},
    "inet_down": {"gt": "200"},
    "disk_space": {"gt": "60"},
    "order": [["dph_total", "asc"]],
    "type": "on-demand",
    "allocated_storage": 5.0,
}
SEARCH_DIFFERENCES = {
    "allocated_storage": "the price is asked for the disk that will be rented",
    "disk_space": "the disk that will be rented is asked for as well",
    "num_gpus": "a job says how many GPUs it wants, one unless told otherwise",
    "direct_port_count": "without an open port there is no direct way in",
    "limit": "without one the service answers with an unknown number of rows",
}


def differing(ours: dict[str, Any], official: dict[str, Any]) -> set[str]:
    """Fields with another value; one that the official client sends empty may be left out."""
    empty = (None, False)
    return {
        name
        for name in ours.keys() | official.keys()
        if ours.get(name) != official.get(name) and not (name not in ours and official[name] in empty)
    }


def test_the_create_call_differs_only_where_it_is_meant_to() -> None:
    offer = Offer("vast", "4242", "12", "RTX 3090", 1, 200_000, 60.0)
    ours = create_body(offer, Order(LEASE, "I", 60.0, "ssh-ed25519 AAAA", 1_764_610_000, {"A": "b"}))
    assert differing(ours, OFFICIAL_CREATE) == set(CREATE_DIFFERENCES)


def test_the_search_differs_only_where_it_is_meant_to() -> None:
    ours = search_body(Need(disk_gb=60, vast_query=QUERY))
    assert ours is not None
    assert differing(ours, OFFICIAL_SEARCH) == set(SEARCH_DIFFERENCES)
    assert ours["disk_space"] == {**OFFICIAL_SEARCH["disk_space"], "gte": 60.0}
