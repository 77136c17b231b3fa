"""The carrier "elastic": each replica group is a separate job, which may fail and rejoin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from time import monotonic, sleep

from torch.distributed import ProcessGroup

from ...assemble.assemble import Assembled
from ...core import faults
from ...core.errors import EnvironmentFault
from ...core.heartbeat import heartbeat
from ...launch.group import create_checkpoint_group
from ...launch.signals import StopFlag
from ...recipe.changes import digest_keys
from ...train.parts import Position
from ..carriers.client_ranks import ClientRanks
from ..carriers.exchange import gather_values
from ..carriers.local_carrier import ClientUpdate
from ..carriers.torchrun_carrier import OwnUpdate, TorchrunCarrier
from ..federation_parts import FederationParts
from ..round_lost import RoundLost
from ..tables import Federation
from .meeting import Meeting, Notice, refuse_difference
from .replica import Replica
from .shared_state import SharedState
from .torchft_quorum import TorchftQuorum

RETRY_SECONDS = 0.5
"""between two quorums that lead to no exchange"""


class ElasticCarrier(TorchrunCarrier):
    """Trains the client of this job, and exchanges updates with the replica groups that are there.

    Every round ends with a quorum. Groups that have trained the round send their updates, in the
    order of their numbers; those that start, or missed a round, receive the state of one that has
    not, and take part in the exchange without an update. If a group is lost in an exchange, the
    others exchange again without it: until all that a group needs has arrived, its state is that
    before the round.

    Args: those of `LocalCarrier`.
    """

    _parts: Assembled
    _quorum: TorchftQuorum

    def __init__(
        self,
        table: Federation,
        parts: Assembled,
        members: FederationParts,
        ranks: ClientRanks,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(table, parts, members, ranks, report)
        self._replica = Replica.find(table.num_clients)
        self._state = SharedState(parts, members.server)
        self._digests = digest_keys(parts.recipe) | {
            "parallel": f"{parts.world.world_size} ranks, {self._state.layout}",
            "parallel.replicate": str(table.num_clients),
        }
        self._digest = sha256(repr(sorted(self._digests.items())).encode()).hexdigest()[:16]
        self._is_new, self._is_asked = True, False
        self._deadline = 0.0
        self._meeting: Meeting | None = None
        """a quorum whose groups wait for this one"""
        self._members: tuple[int, ...] = ()
        self._reported: tuple[int, ...] = ()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context around all rounds, which connects this job to torchft's lighthouse."""
        world, seconds = self._parts.world, self._table.elastic.timeout_seconds
        group = create_checkpoint_group(world, self._parts.resilience.collective_timeout_seconds)
        self._quorum = TorchftQuorum(
            self._replica, world.rank, world.world_size, group, seconds, self._report
        )
        self._deadline = monotonic() + self._table.elastic.join_seconds
        try:
            yield
        finally:
            self._quorum.close()

    @property
    def peers(self) -> ProcessGroup:
        """The ranks of this place in the replica groups of the quorum."""
        return self._quorum.peers

    @property
    def members(self) -> Sequence[int]:
        """The numbers of the replica groups of the quorum, ascending."""
        return self._members

    def wants_stop(self, stop: StopFlag) -> bool:
        """Return whether a signal asks a rank of this replica group to stop."""
        self._is_asked = stop.agree()
        return self._is_asked

    def catch_up(self, position: Position, check: Callable[[], None]) -> bool:
        """Receive the state of another replica group, if this one starts or has missed a round.

        Args:
            position: the position of the run, which becomes the other group's.
            check: called while this waits; what it raises ends the wait.

        Returns:
            whether it has received one.
        """
        while self._is_new or self._meeting:
            meeting = self._meeting or self._meet(position, check)
            self._meeting = None
            if meeting.waits(self._table.num_clients):
                self._report_members(meeting.members, "waiting for the others")
                sleep(RETRY_SECONDS)
                continue
            if not self._send_state(meeting):
                continue
            self._is_new = False
            self._meeting = meeting if meeting.has_updates else None
            source, is_behind = meeting.source, self._replica.number in meeting.receivers
            if is_behind:
                self._state.take(meeting.step, source.numbers, position)
                if meeting.step or meeting.has_updates:
                    text = f"the state after step {meeting.step}"
                    self._report(f"received {text} from replica group {source.number}")
            return is_behind
        return False

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train this job's client, and exchange updates with the groups of a quorum.

        Args: those of `LocalCarrier.run_round`.

        Raises:
            RoundLost: the other groups have finished the round without this one, or a signal asks
                this one to stop before they are there.
        """
        own, meeting, self._meeting = None, self._meeting, None
        if meeting is None:
            own = self._train_own(position, check)
        while True:
            if meeting is None:
                meeting = self._meet(position, check, own)
                if self._replica.number in meeting.receivers or not meeting.has_updates:
                    self._meeting = meeting
                    raise RoundLost
                if not self._send_state(meeting):
                    meeting = None
                    continue
            faults.point("federation.exchange", self._replica.number, position.step)
            try:
                updates = self._share(own, meeting.reports, position)
                break
            except RuntimeError as error:
                if not isinstance(error, _Uncommitted):
                    self._retry(error)
            own, meeting = self._collect_again(own), None
        yield from updates

    def confirm(self) -> None:
        """Wait until all groups have what they need, and all ranks of this one agree.

        Raises:
            RuntimeError: a group was lost.
        """
        gather_values(self.peers, True)
        if not self._quorum.commit():
            raise _Uncommitted

    def _collect_again(self, own: OwnUpdate | None) -> OwnUpdate | None:
        """Return this job's update once more: the exchange may have overwritten it."""
        if own is None or self._server.compressor.is_lossy:
            return own
        client = self._clients[self._replica.number]
        _, gradient = self._server.collect(client, own.report.weight)
        return OwnUpdate(own.report, gradient, own.payloads)

    def _meet(
        self, position: Position, check: Callable[[], None], own: OwnUpdate | None = None
    ) -> Meeting:
        """Wait for a quorum, and return what its groups have told one another.

        Args:
            position: the position of the run.
            check: called while this waits; what it raises ends the wait.
            own: the update of this group; None: it has not trained.

        Raises:
            RoundLost: a signal asks to stop, and the position is not saved.
            RecipeError: the other groups have another recipe.
            EnvironmentFault: another group has the same number.
        """

        def check_wait() -> None:
            check()
            if self._is_asked and not self._is_new:
                raise RoundLost

        with heartbeat.phase("quorum"):
            while True:
                check_wait()
                meeting, error = self._form(position, check_wait, own)
                if not self._quorum.all_ranks(meeting is not None) or meeting is None:
                    self._retry(error)
                    continue
                if meeting.is_doubled or meeting.differing:
                    self._refuse(meeting)
                elif len(meeting.members) >= self._table.elastic.min_replicas:
                    break
                else:
                    self._report_members(meeting.members, "fewer than min_replicas")
                sleep(RETRY_SECONDS)
        if not meeting.waits(self._table.num_clients):
            self._report_members(meeting.members, f"after step {meeting.step}")
        self._members = meeting.members
        return meeting

    def _form(
        self, position: Position, check: Callable[[], None], own: OwnUpdate | None
    ) -> tuple[Meeting | None, Exception | None]:
        """Form a quorum, and tell its groups where this one is."""
        is_patient = self._is_new and monotonic() < self._deadline
        notice = Notice(
            self._replica.number,
            position.step,
            asdict(own.report) if own else None,
            self._is_new,
            is_patient,
            self._digest,
            self._state.numbers(position),
        )
        if not self._quorum.form(position.step, check):
            return None, ConnectionError("a replica group of the quorum is gone")
        try:
            return Meeting.read(gather_values(self.peers, asdict(notice))), None
        except (RuntimeError, ValueError) as error:
            return None, error

    def _refuse(self, meeting: Meeting) -> None:
        """Raise an error if the number or the recipe of this group conflicts with the others'.

        Raises:
            EnvironmentFault: this group starts, and one of the same number is there.
            RecipeError: its recipe differs from that of the group whose state others receive.
        """
        number, source = self._replica.number, meeting.source.number
        if meeting.is_doubled:
            if self._is_new and meeting.members.count(number) > 1:
                message = f"another replica group {number} is there"
                raise EnvironmentFault(message, "give each a REPLICA_GROUP_ID of its own")
            return
        told = None
        with suppress(RuntimeError):  # a group is lost: the next quorum shows it
            told = gather_values(self.peers, self._digests)
        if told and number in meeting.differing:
            raise refuse_difference(self._digests, told[meeting.rank_of(source)], source)

    def _send_state(self, meeting: Meeting) -> bool:
        """Give the state of one group to those that need it; return whether it has arrived."""
        receivers = [meeting.rank_of(number) for number in meeting.receivers]
        source, failure = meeting.source, None
        if not receivers:
            return True
        try:
            rank = meeting.rank_of(source.number)
            self._state.send(self.peers, source.numbers["has_average"], rank, receivers)
        except RuntimeError as error:
            failure = error
        if has_arrived := self._quorum.all_ranks(failure is None):
            return has_arrived
        self._retry(failure)
        return False

    def _report_members(self, members: tuple[int, ...], what: str) -> None:
        """Tell the user which replica groups are there, if that has changed."""
        count = self._table.num_clients
        if (self._reported or tuple(range(count))) != members:
            numbers = ", ".join(map(str, members))
            self._report(f"replica groups {numbers} of {count} are there, {what}")
        self._reported = members

    def _retry(self, error: Exception | None) -> None:
        """Leave the quorum, because a rank of this group has lost a peer."""
        self._quorum.fail(error or ConnectionError("another rank of this group lost a peer"))
        sleep(RETRY_SECONDS)


class _Uncommitted(RuntimeError):
    """A rank of this replica group lacks something, as all of its ranks know."""
