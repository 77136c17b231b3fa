import pytest

from tests.commands import run_trainer
from tests.download.hub_server import Hub


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def trainer(hub, tmp_path):
    """Run a command line against the server, with caches of its own."""

    def trainer(*words, ranks=1, **environ):
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",  # other tests of this process may have set it
        }
        (tmp_path / "work").mkdir(exist_ok=True)
        return run_trainer(*words, folder=tmp_path / "work", ranks=ranks, **{**settings, **environ})

    return trainer
