"""An encoder as a source of scores, against transformers' own on a small random BERT."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llamarl.models.config import tiny_directory
from llamarl.scoring.classifier import Classifier, check_encoder, most_tokens_of, of_label
from llamarl.scoring.kinds.encoder import EncoderKind
from llamarl.scoring.kinds.kind import Given
from llamarl.scoring.scorer import score_all, site_alone, text_item
from tests.build.kind_settings import encoder_settings
from tests.build.model_directory import change_json
from tests.scorers import LABELS, write_encoder, write_scorer
from tests.tolerances import rounding

TEXTS = ["12+34=46", "what", "one two three four", "9", "0000000000000000"]
SAMPLES = [(f"ask {i}", text, {}) for i, text in enumerate(TEXTS)]
LOGITS = rounding(terms=16, depth=2 * 2, size=2.0)  # width and layers, and how logits deviate


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    write_encoder(path := tmp_path_factory.mktemp("bert"))
    return path


@pytest.fixture
def make(directory):
    made = []

    def make(*, reproducible=False, **changes):
        settings = encoder_settings(directory, **{"label": "toxic", **changes})
        source = Classifier(settings, site_alone(torch.device("cpu")), reproducible=reproducible)
        source.start()
        made.append(source)
        return source

    yield make
    for source in made:
        source.close()


@torch.no_grad()
def by_transformers(path, *texts) -> torch.Tensor:
    """[R] logits of one text, or of a pair, by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    return model(**AutoTokenizer.from_pretrained(path)(*texts, return_tensors="pt")).logits[0]


def items_of(samples):
    return [text_item(*sample) for sample in samples]


@pytest.mark.machine
@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("reads, reproducible", [("completion", True), ("pair", False)])
def test_scores_are_those_of_transformers(make, directory, reads, reproducible):
    made = make(reads=reads, reproducible=reproducible)
    outcomes = score_all(made, items_of(SAMPLES))
    for (prompt, text, _), outcome in zip(SAMPLES, outcomes):
        texts = (prompt, text) if reads == "pair" else (text,)
        expected = by_transformers(directory, *texts)[LABELS.index("toxic")]
        assert outcome.kind == "score"
        assert outcome.value == pytest.approx(float(expected), abs=LOGITS)


@pytest.mark.bitwise("a reproducible score depends on its text alone")
def test_in_step_with_the_trainer_a_score_is_that_of_the_text_alone(make):
    scorer = make(reproducible=True)
    items = items_of(SAMPLES)
    assert score_all(scorer, items) == [score_all(scorer, [item])[0] for item in items]


@pytest.mark.parametrize("reproducible, at_once", [(False, [3, 2]), (True, [1, 1, 1, 1, 1])])
def test_texts_are_scored_together_unless_the_run_is_reproducible(
    directory, monkeypatch, reproducible, at_once
):
    """The site of a script is reproducible in any case, and says nothing of the run."""
    settings = encoder_settings(directory, label="toxic")
    job = SimpleNamespace(reproducible=reproducible)
    given = Given(settings, "encoder", "reward", remedy="", must_score=True)
    scorer = EncoderKind(settings, given, job, None).make(site_alone(torch.device("cpu")))
    scorer.start()
    sizes = []
    compute = Classifier._scores
    monkeypatch.setattr(
        Classifier, "_scores", lambda self, texts: sizes.append(len(texts)) or compute(self, texts)
    )
    score_all(scorer, items_of(SAMPLES))
    assert sizes == at_once


def test_outputs_are_logit_probability_and_its_log():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert of_label(logits, 1, "logit").tolist() == pytest.approx([math.log(3)])
    assert of_label(logits, 1, "probability").tolist() == pytest.approx([0.75])
    assert of_label(logits, 0, "log_probability").tolist() == pytest.approx([math.log(0.25)])
    one = torch.tensor([[math.log(3.0)]])
    assert of_label(one, 0, "probability").tolist() == pytest.approx([0.75])


def test_what_is_too_long_is_an_error_of_its_own(make):
    texts = items_of([("", text, {}) for text in ("1", "1" * 20, "2")])
    short, long, again = score_all(make(max_tokens=10), texts)
    assert short.kind == again.kind == "score"
    assert long.kind == "error" and "tokens, and the encoder reads 10" in long.reason


def test_it_keeps_the_contract_of_a_source(make):
    source = make()
    assert source.pending == 0 and not source.wait(0.0)
    for key in (7, 0, 3, 5):
        assert source.is_busy == (key == 5), "with a batch of three"
        source.submit(key, text_item("p", "1", {}))
    source.release([7, 0, 3, 5])
    assert source.pending == 4 and source.wait(0.0)
    first = source.poll()
    assert [key for key, _ in first] == [7, 0, 3] and source.pending == 1
    source.close()
    assert source.pending == 0
    source.close()


@pytest.mark.parametrize(
    "label, max_tokens, says",
    [
        (None, 32, "gives 3 scores; name one of mild, toxic, odd"),
        ("bad", 32, "has no label bad; name one"),
        ("odd", 41, "it reads 40 tokens, fewer than max_tokens=41"),
    ],
)
def test_what_an_encoder_does_not_have_is_refused_with_what_it_has(
    directory, label, max_tokens, says
):
    check_encoder(directory, "odd", 40)
    with pytest.raises(ValueError, match=says):
        check_encoder(directory, label, max_tokens)


def test_a_directory_that_is_no_encoder_is_refused(directory, tmp_path):
    write_scorer(tmp_path / "decoder")
    with pytest.raises(ValueError, match="reads from left to right; use reward=model"):
        check_encoder(tmp_path / "decoder", None, 32)
    own = shutil.copytree(directory, tmp_path / "own")
    change_json(own / "config.json", model_type="mine")
    for path in (tiny_directory(), own):
        with pytest.raises(ValueError, match="no classifier that transformers has"):
            check_encoder(path, None, 32)
    change_json(own / "config.json", model_type="bert")
    (own / "model.safetensors").rename(own / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors only"):
        check_encoder(own, "odd", 32)


@pytest.mark.parametrize(
    "config_class, most",
    [("BertConfig", 514), ("RobertaConfig", 512), ("MPNetConfig", 512)],
)
def test_positions_behind_the_pad_token_are_not_read(config_class, most):
    """The longest text that a random encoder reads; one token more is beyond its positions."""
    import transformers

    config = getattr(transformers, config_class)(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=514,
        pad_token_id=1,
    )
    assert most_tokens_of(config) == most
    model = transformers.AutoModel.from_config(config)
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))
