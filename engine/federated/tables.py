"""The recipe's `[federation]` table, and the registries of its components. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ..core.config import (
    DEFAULTS,
    Component,
    Count,
    OneOf,
    Table,
)
from ..core.registry import Named, Registry
from ..core.text.expressions import match_names
from .arrivals.tables import Late, Trace, dropouts
from .elastic.tables import Elastic
from .experts.tables import ExpertSubsets
from .layers.tables import PARAMETERS, Fragments, LayerPolicy, StateSchedule
from .merge.tables import Admission
from .partition.tables import FederationClient
from .server.tables import ServerOptimizerConfig, server_optimizers

if TYPE_CHECKING:
    from ..data.tables import Data
    from .compression.codecs import Codec
    from .merge.rules import MergeRule

PositiveFloat = Annotated[float, Field(gt=0)]


class CompressionConfig(Component):
    """Base of every compression of pseudo-gradients."""

    @property
    def feedback(self) -> float:
        """Share of its compression error that a client adds to its next pseudo-gradient."""
        return 0.0

    def build(self) -> Codec | None:
        """Return the codec; None sends fp32."""
        return None


class LossyCompression(CompressionConfig):
    """Base of compressions that lose something."""

    error_feedback: bool = True
    """each client adds what the compression lost to its next pseudo-gradient"""
    error_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """share of its compression error that a client adds to its next pseudo-gradient; below 1, the
    errors of earlier rounds count less"""

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if not self.error_feedback and self.error_decay != 1:
            raise ValueError("error_decay has no effect without error_feedback: remove one")
        return self

    @property
    def feedback(self) -> float:
        """Share of its compression error that a client adds to its next pseudo-gradient."""
        return self.error_decay if self.error_feedback else 0.0


compressions: Registry[CompressionConfig] = Registry(
    "compression",
    default="none",
    built_in={
        "none": "engine.federated.compression.configs:NoCompression",
        "bf16": "engine.federated.compression.configs:BF16",
        "int8": "engine.federated.compression.configs:Int8",
        "int4": "engine.federated.compression.configs:Int4",
        "topk": "engine.federated.compression.configs:TopK",
    },
)


class MergeConfig(Component):
    """Base of every merge: how the pseudo-gradients of a round become one."""

    def build(self) -> MergeRule | None:
        """Return the rule that merges a round; None: a weighted mean, as updates come."""
        return None


merges: Registry[MergeConfig] = Registry(
    "merge",
    default="mean",
    built_in={
        "mean": "engine.federated.merge.configs:WeightedMean",
        "clipped_mean": "engine.federated.merge.configs:ClippedMean",
        "trimmed_mean": "engine.federated.merge.configs:TrimmedMean",
        "median": "engine.federated.merge.configs:Median",
        "krum": "engine.federated.merge.configs:Krum",
    },
)


class CarrierConfig(Component):
    """Base of what moves weights and updates between the server and its clients."""

    def build(self, table: Federation) -> type[Any]:
        """Return the class of the carrier that a recipe's table asks for; see `LocalCarrier`."""
        raise NotImplementedError

    def num_parts(self, table: Federation) -> int:
        """Return into how many parts the ranks of a job are divided, one for each client.

        Args:
            table: the recipe's `[federation]`.
        """
        return 1


carriers: Registry[CarrierConfig] = Registry(
    "carrier",
    default="local",
    built_in={
        "local": "engine.federated.carriers.configs:Local",
        "torchrun": "engine.federated.carriers.configs:Torchrun",
        "job": "engine.federated.carriers.configs:JobCarrier",
        "elastic": "engine.federated.carriers.configs:ElasticReplicas",
    },
)


class Federation(Table):
    """Federated and low-communication training: clients train apart, a server merges them."""

    carrier: Annotated[str, OneOf(carriers)] = "local"
    """"local": clients train on this machine, in turn or in worker processes, or in the ranks of
    --nproc; "torchrun": all at once, each in its own part of the ranks of --nproc, or of a job;
    "job": the replica groups of parallel.replicate of an ordinary `trainer run` are the clients;
    "elastic": the same, and each replica group is a separate job, which may fail and rejoin"""
    processes: Count = 1
    """worker processes of "local", which train a client each at a time; 1: clients in turn"""
    clients: Count | None = None
    """number of clients, all alike; or give one [[federation.client]] each"""
    client: Annotated[list[FederationClient], Field(max_length=10_000)] = []
    """in place of clients: a table for each client"""
    clients_per_round: Count | None = None
    """clients that are drawn for a round, without replacement; default: all"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the drawn clients that is left out of each round; at least one stays"""
    dropout_function: Annotated[str, OneOf(dropouts)] = "uniform"
    """which of them: "uniform": at random; "slowest": those that take longest by
    [federation.trace]"""
    rounds: Count | None = None
    """rounds of the run, each of which ends with a step of the server optimizer; with carrier =
    "job" or "elastic", run.steps says how long to train"""
    local_steps: Count | None = None
    """optimizer steps of a client in a round; or give local_tokens"""
    local_tokens: Count | None = None
    """tokens of a client in a round, rounded up to whole steps"""
    weighting: Literal["tokens", "samples", "uniform"] = "tokens"
    """weight of a client in the mean: "tokens": what the task's loss is a mean over; "samples"; or
    "uniform": all the same"""
    client_optimizer: Literal["keep", "reset", "aggregate", "schedule"] = "keep"
    """a client's optimizer state between rounds: "keep" it on the client; "reset" it; "aggregate":
    average it as the weights, and send it back, for three times the traffic with AdamW;
    "schedule": average each state in the rounds that [[federation.states]] says, and keep it in
    between"""
    states: list[StateSchedule] = []
    """how often weights and states of the clients' optimizer are averaged"""
    layers: list[LayerPolicy] = []
    """weights that are frozen, personal or drawn again"""
    buffers: Literal["average", "freeze", "local"] = "average"
    """what becomes of saved buffers, such as the biases that balance experts: "average": the mean
    of the clients', without the server optimizer; "freeze": rounds start with the initial ones;
    "local": each client keeps its own"""
    partition: Literal["rows", "documents", "sources", "dirichlet"] = "rows"
    """"rows": client c of C takes the rows of replica c of C of an ordinary run whose global_batch
    is C times larger; "documents": each document is at one client, by a hash of its tokens;
    "sources": client c takes each C-th source, from the c-th on; "dirichlet": as "documents", with
    unequal shares of each source"""
    alpha: PositiveFloat = 0.5
    """of "dirichlet": small values give each source to few clients, large ones to all alike"""
    server: Annotated[ServerOptimizerConfig, Named(server_optimizers)] = DEFAULTS
    """the outer optimizer"""
    compression: Annotated[CompressionConfig, Named(compressions)] = DEFAULTS
    """how pseudo-gradients travel"""
    merge: Annotated[MergeConfig, Named(merges)] = DEFAULTS
    """how the pseudo-gradients of a round become one"""
    admission: Admission = DEFAULTS
    """which updates are merged"""
    fragments: Fragments = DEFAULTS
    """merges a part of the weights in each round"""
    cosines: bool = False
    """write the cosine between each two updates of a round to the rows of clients; the server then
    holds all updates of a round"""
    experts: ExpertSubsets = DEFAULTS
    """which experts each client holds"""
    elastic: Elastic = DEFAULTS
    """when replica groups that are separate jobs wait for one another"""
    late: Late = DEFAULTS
    """when a round ends, and what becomes of updates that arrive later"""
    trace: Trace = DEFAULTS
    """simulated durations and failures of clients"""

    @property
    def is_job(self) -> bool:
        """Whether the clients are the replica groups of an ordinary run."""
        return self.carrier in ("job", "elastic")

    @property
    def is_elastic(self) -> bool:
        """Whether each of these replica groups is a job of its own."""
        return self.carrier == "elastic"

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.client) or self.clients or 0

    @property
    def simulates_time(self) -> bool:
        """Whether simulated durations and failures decide what a round merges."""
        return self.late.is_enabled or self.trace.failure > 0

    @property
    def keeps_weights(self) -> bool:
        """Whether clients keep weights of their own between rounds."""
        is_partial = any(each.state == PARAMETERS for each in self.states)
        is_personal = any(each.policy == "personal" for each in self.layers)
        return self.fragments.is_enabled or is_partial or is_personal

    def policy_of(self, name: str) -> LayerPolicy | None:
        """Return the first policy of [[federation.layers]] that matches a weight, or None."""
        return next((each for each in self.layers if match_names(each.match)(name)), None)

    @property
    def averages_states(self) -> bool:
        """Whether states of the clients' optimizer travel."""
        return self.client_optimizer in ("aggregate", "schedule")

    @property
    def sample_size(self) -> int:
        """The number of clients that are drawn for a round."""
        return self.clients_per_round or self.num_clients

    def steps_of(self, data: Data) -> int:
        """Return a client's optimizer steps in a round.

        Args:
            data: the `[data]` table of a client.
        """
        if self.local_steps is not None:
            return self.local_steps
        return -(-(self.local_tokens or 0) // (data.global_batch * data.seq_len))

    def client_name(self, number: int) -> str:
        """Return what metrics call a client."""
        return self.client[number].name if self.client else str(number)

    def sources_of(self, number: int, labels: list[str]) -> list[str]:
        """Return the labels of the sources that a client alone has; empty: it takes rows of all.

        Args:
            number: number of the client, counted from 0.
            labels: the labels of all sources.
        """
        if self.client and self.client[number].sources:
            return self.client[number].sources
        return labels[number :: self.num_clients] if self.partition == "sources" else []
