"""Texts begin with the token that a tokenizer's own files put there."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.conversion.models import EOS, write_tokenizer_files
from trainer.engine.corpus.tokenise import tokenise
from trainer.engine.inference.measure import Encoded
from trainer.engine.tokenizers.byte_tokenizer import begin_text, context_id
from trainer.engine.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument

START = "<|start|>"


def test_texts_begin_as_the_post_processor_says(tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path)
    plain = HuggingFaceTokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    number = plain.vocab_size
    added = content["added_tokens"][0] | {"id": number, "content": START}
    content["added_tokens"].append(added)
    text, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    start = {"SpecialToken": {"id": START, "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, pair],
        "special_tokens": {START: {"id": START, "ids": [number], "tokens": [START]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    begun = HuggingFaceTokenizer(tmp_path)
    assert (plain.bos_id, begun.bos_id) == (None, number)
    assert plain.fingerprint != begun.fingerprint
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for words in ("import this", "", f"{START}def"):
        ids = begin_text(begun, begun.encode(words))
        assert ids.tolist() == auto(words.removeprefix(START))["input_ids"]
        assert begin_text(begun, ids) is ids
    assert begin_text(plain, plain.encode("def")).tolist() == plain.encode("def").tolist()

    chunk = next(tokenise(["one", MaskedDocument("two", ((0, 3),))], "stop", begun))
    one, two, end = begun.encode("one").tolist(), begun.encode("two").tolist(), begun.eos_id
    assert chunk.tokens.tolist() == [number, *one, end, number, *two, end]
    assert chunk.loss_mask is not None
    assert (~chunk.loss_mask).nonzero()[0].tolist() == [0, len(one) + 2]
    assert next(tokenise(["one"], "stop", begun)).tokens.tolist() == [number, *one, end]

    assert (context_id(begun), context_id(plain)) == (number, plain.encode(EOS)[0])
    for stored in (begun.encode("one"), begin_text(begun, begun.encode("one"))):
        assert Encoded(stored, "one", None, begun).tokens.tolist() == [number, *one]
