"""The limits of a deployment in Prefect, signed, for workers that do not share the home of the machine that deploys.

    onward deploy, with ONWARD_DEPLOY_KEY    -->  a variable of Prefect: the limits, and their HMAC-SHA256 with the key
    a run of the deployment, anywhere        -->  reads the variable, and computes the HMAC again with the worker's key

Who may start runs in Prefect may change the variable, too, but has no key. The id of the deployment is signed as well:
the limits of another deployment do not count. The key is in the environment of both machines, and never in Prefect.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from typing import Any

from onward.flows.configuration import prefect_client
from onward.trainer.errors import ConfigError

KEY = "ONWARD_DEPLOY_KEY"
LEAST_LETTERS = 16
MOST_LETTERS = 4096
"""Of the limits: Prefect stores 5,000 letters in a variable."""


def refuse_unpublishable(limits: str, deployment_id: str) -> None:
    """Raise ConfigError for limits that are too long to be stored in Prefect, a key that is too short, and no key where
    Prefect has signed limits: those would go on to count. deployment_id: of the deployment so far, "" for a new one.
    """
    if not _key():
        if deployment_id and _stored(deployment_id) is not None:
            raise ConfigError(
                f"Prefect has signed limits of this deployment, which would stay as they are: set {KEY}, or delete the "
                "deployment first (`onward deployments delete`)"
            )
    elif len(limits) > MOST_LETTERS:
        raise ConfigError(
            f"the limits of the deployment have {len(limits):,} letters, and Prefect takes {MOST_LETTERS:,}: name "
            f"fewer directories, or deploy without {KEY} on a home that the worker shares"
        )


def publish_limits(deployment_id: str, limits: str) -> None:
    """Store the limits of a deployment in Prefect, if there is a key. Call `refuse_unpublishable` first."""
    if not (key := _key()):
        return
    from prefect.client.schemas.actions import VariableCreate, VariableUpdate

    value = {"limits": limits, "signature": _signature(key, deployment_id, limits)}
    with prefect_client() as client:
        name = _name(deployment_id)
        if client.read_variable_by_name(name):
            client.update_variable(VariableUpdate(name=name, value=value))
        else:
            client.create_variable(VariableCreate(name=name, value=value))


def published_limits(deployment_id: str) -> str:
    """Return the limits of a deployment from Prefect; "" if there are none or this process has no key.

    Raises ConfigError for limits that were not signed with this key.
    """
    if not (key := _key()):
        return ""
    if (stored := _stored(deployment_id)) is None:
        return ""
    value = stored if isinstance(stored, dict) else {}
    limits, signature = str(value.get("limits", "")), str(value.get("signature", ""))
    if not hmac.compare_digest(signature.encode(), _signature(key, deployment_id, limits).encode()):
        raise ConfigError(
            f"the limits of this deployment in Prefect were not signed with the {KEY} of this worker: somebody has "
            "changed them, or the keys differ; set the same key, and deploy again"
        )
    return limits


def withdraw_limits(deployment_id: str) -> None:
    """Delete the limits of a deployment that is deleted, for which nobody needs the key."""
    from prefect.exceptions import ObjectNotFound

    with prefect_client() as client, contextlib.suppress(ObjectNotFound):
        client.delete_variable_by_name(_name(deployment_id))


def _stored(deployment_id: str) -> Any:
    """Return what Prefect has in place of the limits of a deployment, signed or not; None if it has nothing."""
    with prefect_client() as client:
        found = client.read_variable_by_name(_name(deployment_id))
    return found and found.value


def _key() -> bytes:
    key = os.environ.get(KEY, "")
    if key and len(key) < LEAST_LETTERS:
        raise ConfigError(f"{KEY} has {len(key)} letters, and needs {LEAST_LETTERS}: `openssl rand -hex 32` makes one")
    return key.encode()


def _signature(key: bytes, deployment_id: str, limits: str) -> str:
    return hmac.new(key, f"{deployment_id}\n{limits}".encode(), hashlib.sha256).hexdigest()


def _name(deployment_id: str) -> str:
    return f"onward_limits_{deployment_id.replace('-', '_')}"
