"""Credentials of buckets that expire: a provider that every process asks again.

    CAIRN_CREDENTIALS=boto3 | google | azure      the providers that obstore has
    CAIRN_CREDENTIALS=module:function             one of your own

The function gets the url of a store and returns a provider: a callable without arguments, which
returns the credentials as a dict with `expires_at`, as obstore describes it. None: the environment
has what this store needs. The providers of obstore are for the stores of their own cloud. The name
is in the environment, and not in the job, because driver, slots, workers and the command line open
stores each for themselves.

Always true here:
- without the variable nothing changes, nor for a store that the named provider is not for;
- credentials are asked for again before they expire, in every process and while it runs;
- credentials that a url's options name go before those of a provider.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cairn.errors import PlanError

VARIABLE: Final = "CAIRN_CREDENTIALS"


class _Known(NamedTuple):
    path: str
    schemes: tuple[str, ...]
    """Stores at urls with these understand its credentials."""


_AZURE: Final = ("az", "azure", "abfs", "abfss")
_KNOWN: Final = {
    "boto3": _Known("obstore.auth.boto3:Boto3CredentialProvider", ("s3", "s3a")),
    "google": _Known("obstore.auth.google:GoogleCredentialProvider", ("gs",)),
    "azure": _Known("obstore.auth.azure:AzureCredentialProvider", _AZURE),
}
_GIVEN: Final = (
    "access_key",
    "secret",
    "sas_token",
    "service_account",
    "application_credentials",
    "account_key",
    "token",
)


def provider_for(url: str, config: Mapping[str, str]) -> Any | None:
    """Return the provider of credentials for a store; None: those of config and environment."""
    name = os.environ.get(VARIABLE, "")
    if not name or any(part in option for option in config for part in _GIVEN):
        return None
    known = _KNOWN.get(name)
    if known is not None and url.partition(":")[0].lower() not in known.schemes:
        return None
    found = _find(name if known is None else known.path, name)
    made = _call(found, name, (url,) if known is None else ())
    if made is not None and not callable(made):
        raise PlanError(
            f"{VARIABLE}={name}: the function returned {type(made).__name__} for {url}\n"
            "  expected: a callable that returns credentials, or None\n"
            "  next: return the function itself, not its result: credentials are asked for again"
        )
    return made


def _find(path: str, name: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"{VARIABLE}={name} cannot be loaded on {os.uname().nodename}: {error}\n"
            f"  expected: module:function, or one of {', '.join(_KNOWN)}\n"
            "  next: install the module on driver and executors, or ship it with --py-files"
        ) from error


def _call(make: Any, name: str, arguments: tuple[str, ...]) -> Any:
    try:
        return make(*arguments)
    except Exception as error:
        raise PlanError(
            f"{VARIABLE}={name} found no credentials on {os.uname().nodename}: "
            f"{type(error).__name__}: {error}\n"
            "  next: give this host a role or a login that the provider can read"
        ) from error


__all__ = ["VARIABLE", "provider_for"]
