"""When a job that failed is started again."""

from trainer.engine.launch.failure import Restarts


def test_restarts_are_counted_since_the_last_checkpoint() -> None:
    steps = [None, None, 10, 20, 20, 20, 30]
    restarts = Restarts(2, iter(steps).__next__, ["--set=run.resume=auto"])
    assert restarts.arguments() == [], "the recipe's own run.resume, until this job has saved"
    assert restarts.allow()
    assert restarts.arguments() == []
    assert restarts.allow()
    assert restarts.arguments() == ["--set=run.resume=auto"]
    assert [restarts.allow() for _ in range(3)] == [True, True, False]
