"""Every fault of the simulator, its right end, and the test that holds us to it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from pennypod.simulator.faults import CALL_FAULTS, POD_FAULTS

TESTS = Path(__file__).resolve().parents[1]
CLIENTS = "contract/test_clients_on_simulator.py"
PODS = "contract/test_pods_with_faults.py"


class End(NamedTuple):
    """What becomes of the run, and where that is tested. In each of them no pod is left, and never were there two."""

    right: str
    file: str
    test: str


ENDS: dict[str, End] = {
    # calls
    "lost_reply": End("found by its name and kept", CLIENTS, "test_a_create_whose_answer_is_lost_is_found_by_its_name"),
    "error_after_commit": End(
        "found by its name and kept", CLIENTS, "test_a_create_whose_answer_is_lost_is_found_by_its_name"
    ),
    "malformed": End("found by its name and kept", CLIENTS, "test_a_create_whose_answer_is_lost_is_found_by_its_name"),
    "error": End(
        "settled over the listing's lag, then the next rung",
        CLIENTS,
        "test_a_create_that_failed_without_effect_is_settled_before_the_next_rung",
    ),
    "timeout": End(
        "settled over the listing's lag, then the next rung",
        CLIENTS,
        "test_a_create_that_runs_into_a_time_limit_is_settled_before_the_next_rung",
    ),
    "slow": End("waited for, once", CLIENTS, "test_a_create_that_is_answered_late_is_no_second_create"),
    "rate_limited": End(
        "waits, with and without Retry-After, and takes the same offer",
        CLIENTS,
        "test_a_create_refused_for_too_many_calls_waits_and_takes_the_same_offer",
    ),
    "search_quota": End("fails and tells the hours", CLIENTS, "test_the_daily_search_quota_is_told_with_its_hours"),
    "auth": End(
        "the ladder ends at once, though it looks like 404",
        CLIENTS,
        "test_no_money_and_a_wrong_key_end_the_ladder_at_once",
    ),
    "forbidden": End("the ladder ends at once", CLIENTS, "test_a_key_that_may_not_rent_at_all_ends_the_ladder"),
    "low_balance": End("the ladder ends at once", CLIENTS, "test_no_money_and_a_wrong_key_end_the_ladder_at_once"),
    "error_with_id": End(
        "destroyed, then the next rung", CLIENTS, "test_an_instance_that_a_failed_create_left_is_ours_and_is_destroyed"
    ),
    "vanished_offer": End("the next rung", CLIENTS, "test_a_refused_create_goes_to_the_next_rung"),
    "no_capacity": End("the next rung", CLIENTS, "test_a_refused_create_goes_to_the_next_rung"),
    "destroy_noop": End(
        "asked again until it is gone; never called done",
        CLIENTS,
        "test_a_destroy_that_never_works_is_never_called_done",
    ),
    "short_page": End("read again and found", CLIENTS, "test_a_lost_create_is_found_though_a_page_is_short"),
    # pods
    "stuck_loading": End("the next rung", CLIENTS, "test_a_pod_that_does_not_come_up_makes_room_for_the_next"),
    "pull_error": End(
        "the next rung, and the log's words as the reason",
        CLIENTS,
        "test_the_reason_for_a_lost_rung_is_what_the_pods_log_says",
    ),
    "restart_loop": End(
        "the next rung, and the log's words as the reason",
        CLIENTS,
        "test_the_reason_for_a_lost_rung_is_what_the_pods_log_says",
    ),
    "slow_loading": End("waited for", CLIENTS, "test_an_image_that_loads_slowly_is_waited_for"),
    "wrong_port": End("asked again and entered", PODS, "test_a_pod_that_can_be_entered_in_the_end_is_taken"),
    "direct_blocked": End("entered by the proxy", PODS, "test_a_pod_that_can_be_entered_in_the_end_is_taken"),
    "sshd_late": End("waited for and entered", PODS, "test_a_pod_that_can_be_entered_in_the_end_is_taken"),
    "no_sshd": End("the rung is lost, with the reason", PODS, "test_a_pod_that_is_no_good_costs_its_rung_and_says_why"),
    "key_missing": End(
        "entered where the start script can let the key in, else the rung is lost, with the reason",
        PODS,
        "test_a_pod_that_is_no_good_costs_its_rung_and_says_why",
    ),
    "keys_lost_after": End(
        "let in again through the provider, and the run goes on",
        "integration/test_simulator_pods.py",
        "test_a_key_that_is_lost_in_mid_run_is_let_in_again",
    ),
    "snapshot_lost": End(
        "waited for as long as the run goes on; nothing counts as an image",
        "integration/test_golden_snapshot.py",
        "test_a_bake_that_is_killed_while_its_host_pushes_leaves_no_pod_and_no_image",
    ),
    "bad_gpu": End(
        "the rung is lost, the machine left alone", PODS, "test_a_pod_that_is_no_good_costs_its_rung_and_says_why"
    ),
    "exit_after": End("the next rung", CLIENTS, "test_a_pod_that_is_lost_while_it_is_entered_makes_room_for_the_next"),
    "evict_after": End("the next rung", CLIENTS, "test_a_pod_that_is_lost_while_it_is_entered_makes_room_for_the_next"),
    "offline_after": End(
        "the next rung", CLIENTS, "test_a_pod_that_is_lost_while_it_is_entered_makes_room_for_the_next"
    ),
    "list_lag": End("looked for until it shows", CLIENTS, "test_a_lost_create_is_found_though_the_listing_lags"),
    "gone_lag": End("not gone while it is shown", CLIENTS, "test_an_instance_that_is_still_shown_is_not_gone"),
}
# Neither provider's own timers act, so there is nothing that could be lost by their not acting.
WITHOUT_EFFECT = {"timer_noop"}


@cache
def functions_of(file: str) -> dict[str, str]:
    """The tests of a file by name, with their source and that of their decorators."""
    source = (TESTS / file).read_text("utf-8")
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[min(part.lineno for part in [*node.decorator_list, node]) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_fault_has_its_end() -> None:
    assert set(ENDS) | WITHOUT_EFFECT == set(CALL_FAULTS) | set(POD_FAULTS)


@pytest.mark.parametrize("fault", ENDS)
def test_the_end_is_tested_where_the_table_says(fault: str) -> None:
    end = ENDS[fault]
    source = functions_of(end.file).get(end.test)
    assert source is not None, f"{end.file} has no {end.test}"
    assert f'"{fault}"' in source
