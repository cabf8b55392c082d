"""Ask whether the Prefect server answers, before a call that is only for show: an outage must not delay a run."""

from __future__ import annotations

import urllib.error
import urllib.request

from prefect.settings import get_current_settings

from onward.infra.servers.service_state import responds


def prefect_answers() -> bool:
    """Return whether the Prefect server answers: a call of one that does not is repeated for a minute by its client."""
    url = get_current_settings().api.url
    if url is None or responds(health := f"{url.rstrip('/')}/health"):
        return True
    try:
        with urllib.request.urlopen(health, timeout=5):  # by way of a proxy
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # not for the sake of a certificate that Prefect's client may accept
        return not isinstance(error.reason, ConnectionError | TimeoutError)
    except (ConnectionError, TimeoutError):
        return False
