"""Records what flwr's strategies make of given clients, as an oracle for our server optimizers.

flwr needs an environment of its own (`constraints-federated.txt`):

    python -m venv flwr && flwr/bin/pip install -c constraints-federated.txt flwr numpy
    flwr/bin/python tests/federated/make_flwr_vectors.py tests/federated/flwr_vectors.json
"""

import json
import sys
from importlib.metadata import version

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
)

CLIENTS, ROUNDS, SIZE = 7, 5, 11
rng = np.random.default_rng(0)
START = rng.normal(size=SIZE).astype(np.float32)
# Movements of each client in each round, from the global weights of that round.
MOVES = rng.normal(size=(ROUNDS, CLIENTS, SIZE)).astype(np.float32) * 0.1
COUNTS = rng.integers(1, 20, size=CLIENTS).tolist()
ADAPTIVE = {"eta": 0.05, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-2}


def answer(weights, count):
    status = Status(Code.OK, "")
    return FitRes(status, ndarrays_to_parameters([weights]), count, {})


def run(strategy, counts):
    """Return the global weights after each round."""
    weights, found = START.copy(), []
    for number in range(ROUNDS):
        results = [(None, answer(weights + MOVES[number, c], counts[c])) for c in range(CLIENTS)]
        parameters, _ = strategy.aggregate_fit(number + 1, results, [])
        (weights,) = parameters_to_ndarrays(parameters)
        found.append(np.asarray(weights, dtype=np.float64).tolist())
    return found


def main():
    first = {"initial_parameters": ndarrays_to_parameters([START])}
    alike = [1] * CLIENTS
    strategies = {
        "fedavg": (FedAvg(**first), COUNTS),
        "fedavgm": (FedAvgM(server_learning_rate=0.7, server_momentum=0.9, **first), COUNTS),
        "fedadam": (FedAdam(**ADAPTIVE, **first), COUNTS),
        "fedyogi": (FedYogi(**ADAPTIVE, **first), COUNTS),
        "median": (FedMedian(**first), alike),
        "trimmed_mean": (FedTrimmedAvg(beta=0.2, **first), alike),
        "krum": (Krum(num_malicious_clients=1, **first), alike),
    }
    content = {
        "versions": {name: version(name) for name in ("flwr", "numpy")},
        "start": START.tolist(),
        "moves": MOVES.tolist(),
        "counts": COUNTS,
        "adaptive": ADAPTIVE,
        "weights": {name: run(*each) for name, each in strategies.items()},
    }
    with open(sys.argv[1], "w") as file:
        json.dump(content, file)
        file.write("\n")


if __name__ == "__main__":
    main()
