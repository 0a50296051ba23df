"""The one place where our errors become Ansible results. Top floor: used by `library/`, knows AnsibleModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from pennypod.errors import PennypodError, no_room
from pennypod.settings import disk_is_full


def run_module(
    argument_spec: Mapping[str, Any], body: Callable[[AnsibleModule], dict[str, Any]], **module_options: Any
) -> None:
    """Run a module's body and leave the process with its result.

    A PennypodError becomes a failure of one line with `failure: {code, message, details}`. Anything else is a fault of
    ours: it too becomes one line, with the code "bug" and its type, and never a traceback on the user's screen.
    """
    module = AnsibleModule(argument_spec=dict(argument_spec), supports_check_mode=True, **module_options)
    try:
        result = body(module)
    except PennypodError as exc:
        module.fail_json(msg=exc.message, failure=exc.as_failure())
    except Exception as exc:  # noqa: BLE001 - the last line of defence before the user's screen
        if isinstance(exc, OSError) and disk_is_full(exc):
            full = no_room(exc)
            module.fail_json(msg=full.message, failure=full.as_failure())
        message = f"a fault in pennypod: {type(exc).__name__}: {exc}"
        module.fail_json(msg=message, failure={"code": "bug", "message": message, "details": {}}, exception=exc)
    else:
        module.exit_json(**result)
