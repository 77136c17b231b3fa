"""Which errors mean that the hub cannot be reached."""

import pytest

from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.download.hub_errors import explain_hub_errors
from trainer.engine.download.hub_ids import HubId


def test_only_errors_of_the_connection_mean_that_the_hub_cannot_be_reached():
    errors = pytest.importorskip("huggingface_hub.errors")
    connect_error = next(
        base
        for base in errors.HfHubHTTPError.__mro__[1:]
        if base.__name__ in ("HTTPError", "RequestException")
    )
    for error in (connect_error("no route"), ConnectionResetError("reset"), TimeoutError("late")):
        with (
            pytest.raises(EnvironmentFault, match="cannot be reached"),
            explain_hub_errors(HubId("a/b")),
        ):
            raise error
    for error in (TypeError("wrong argument"), KeyError("missing")):
        with pytest.raises(type(error)), explain_hub_errors(HubId("a/b")):
            raise error
