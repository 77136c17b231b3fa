"""Explains the errors of the hub's library. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import DataError, EnvironmentFault
from ..core.files import path_fault
from .hub_ids import HubId


@contextmanager
def explain_hub_errors(wanted: HubId) -> Iterator[None]:
    """Turn the errors of the hub's library into ours."""
    from huggingface_hub import errors

    fetch = f"where there is a network, `trainer download {wanted} --to assets/...` downloads it"
    try:
        yield
    except errors.GatedRepoError as error:
        raise EnvironmentFault(
            f"{wanted.repo} is gated: its owner asks for consent before a download",
            "agree on its page of the hub, then set HF_TOKEN or run `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{wanted.repo} has no revision {wanted.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{wanted.repo}: no such path here, and no such model on the Hugging Face hub",
            "check the name; a private model needs HF_TOKEN or `hf auth login`",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise EnvironmentFault(
            f"{wanted} is no path here and not in the cache, and HF_HUB_OFFLINE forbids a download",
            fetch,
        ) from error
    except _connection_errors() as error:
        # Those of requests are OSErrors, which huggingface_hub used before version 1.
        if isinstance(error, OSError) and (fault := path_fault(error)):
            raise fault from error
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise EnvironmentFault(
            f"{wanted} is no path here, and the Hugging Face hub cannot be reached: {reason}",
            f"{fetch}; an interrupted download resumes",
        ) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the libraries with which the hub's library downloads."""
    from huggingface_hub import errors

    # Its HTTP library changes with its versions, and is a base of its own errors.
    names = ("HTTPError", "RequestException")
    found = [base for base in errors.HfHubHTTPError.__mro__[1:] if base.__name__ in names]
    if "hf_xet" in sys.modules:  # written in Rust, it raises errors of the network as this
        found.append(RuntimeError)
    return OSError, *found
