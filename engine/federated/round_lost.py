"""What ends a round whose update no one merges."""


class RoundLost(Exception):
    """The other clients have finished the round without this one."""
