"""Documents that are divided over clients by a hash, evenly or by shares of a Dirichlet."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.federated.conftest import RECIPE, rows, tensors
from trainer.engine.corpus.store import TokenStore
from trainer.engine.federated.partition.documents import (
    DocumentShares,
    assign_documents,
    draw_shares,
)
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

rng = np.random.default_rng(0)
DOCUMENTS = [rng.integers(0, 250, size=rng.integers(3, 40)) for _ in range(2000)]


def make_store(documents, fingerprint="f"):
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenStore(np.concatenate(documents).astype(np.uint16), offsets, 0, fingerprint)


def test_a_document_is_at_the_same_client_wherever_it_stands():
    store = make_store(DOCUMENTS)
    at = assign_documents(store, store.num_tokens, [0.25] * 4)
    order = rng.permutation(len(DOCUMENTS))
    moved = make_store([DOCUMENTS[each] for each in order])
    assert (assign_documents(moved, moved.num_tokens, [0.25] * 4) == at[order]).all()
    wide = SimpleNamespace(tokens=store.tokens.astype(np.uint32), offsets=store.offsets)
    assert (assign_documents(wide, store.num_tokens, [0.25] * 4) == at).all()
    # Binomial: five standard deviations of 2,000 draws of one in four.
    assert (abs(np.bincount(at) - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5).all()


def test_shares_are_those_asked_for_and_what_is_held_out_belongs_to_no_client():
    store, shares = make_store(DOCUMENTS), [0.7, 0.0, 0.3]
    stop = int(store.offsets[1500]) + 1
    at = assign_documents(store, stop, shares)
    assert len(at) == 1500
    assert abs((at == 0).sum() - 1050) < 5 * (1500 * 0.7 * 0.3) ** 0.5
    assert not (at == 1).any()


@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_dirichlet_shares_have_its_mean_and_variance(alpha):
    clients = 5
    shares = draw_shares(clients, 20_000, alpha, seed=3)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(shares.mean(0), 1 / clients, atol=0.02)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(shares.var(0), variance, rtol=0.1)


def test_the_documents_of_all_clients_are_those_of_the_source(tmp_path):
    store = make_store(DOCUMENTS)
    shares = DocumentShares({"s": [0.5, 0.3, 0.2]}, ByteTokenizer(), tmp_path)
    found = [shares.select(store, store.num_tokens, "s", client) for client in range(3)]
    texts = [
        tuple(each.tokens[start:stop].tolist())
        for each in found
        for start, stop in zip(each.offsets[:-1], each.offsets[1:], strict=True)
    ]
    assert sorted(texts) == sorted(tuple(map(int, each)) for each in DOCUMENTS)


@pytest.mark.parametrize("partition", ["documents", "dirichlet"])
def test_a_federation_trains_on_divided_documents(command, federate, tmp_path, partition):
    text = "\n".join(f'{{"text": "{chr(97 + n % 26) * 40} {n}"}}' for n in range(400))
    (tmp_path / "one.jsonl").write_text(text)
    source = 'name = "jsonl"\npath = "one.jsonl"'
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('name = "synthetic"', source))
    settings = {"federation__partition": partition, "federation__alpha": 50.0,
                "federation__rounds": 2, "data__cache_dir": tmp_path / "cache"}  # fmt: skip
    run = federate("r", **settings)
    assert tensors(run, 4, "model.")
    assert len({row["loss"] for row in rows(run, "client")}) == 8
    assert len(list((tmp_path / "cache").glob("client-*/tokens.json"))) == 4
    code, _, errors = command("federate", "run", "recipe.toml", "--set=federation.clients=400",
                              f"--set=federation.partition={partition}", "--set=run.name=many",
                              f"--set=data.cache_dir={tmp_path / 'cache'}")  # fmt: skip
    assert code == 4
    assert "client 0: " in errors or "client " in errors
