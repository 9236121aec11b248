"""Scores -> columns: activations, top-k, labels, and every value in the place of its row."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import PLAIN

from gpuml.models.cards import Card
from gpuml.spec import Spec
from gpuml.worker.outputs import activate, columns
from gpuml.worker.runner import Scores

ALL = (
    "device",
    "error",
    "predictedLabel",
    "prediction",
    "probability",
    "rawPrediction",
    "topLabels",
    "topProbabilities",
)
LOGITS = np.array([[1, 3, 2], [0, -1, 5], [4, 4, 4]], np.float32)
NAMES = ("cat", "dog", "cow")


def make(outputs=LOGITS, *, bad=(), labels=NAMES, activation="softmax", top_k=2, names=ALL, waited=None):
    """Columns of a call whose rows at `bad` failed and whose others have these outputs."""
    rows = len(outputs) + len(bad)
    reasons = ["empty: no bytes" if row in bad else None for row in range(rows)]
    seconds = np.arange(4 * len(outputs), dtype=np.float64).reshape(-1, 4) / 1000
    scores = Scores(outputs, [row for row in range(rows) if row not in bad], reasons, seconds)
    card = Card(PLAIN, outputs.shape[1], labels, activation)
    return columns(scores, card, Spec("0" * 64, outputs=names, top_k=top_k), "cuda:1 (address 3)", waited)


def test_timing_is_in_milliseconds_the_feed_shared_by_all_rows_and_none_for_a_failed_one():
    first = make(bad=[1], names=("timing",))["timing"]
    assert first[1] is None
    np.testing.assert_allclose([first[0], first[2], first[3]], [[np.nan, *range(i, i + 4)] for i in (0, 4, 8)])
    later = make(bad=[1], names=("timing",), waited=0.02)["timing"]
    np.testing.assert_allclose(later[3], [5, 8, 9, 10, 11])
    assert make(LOGITS[:0], names=("timing",), waited=0.02)["timing"] == []
    outputs = LOGITS.copy()
    outputs[1, 1] = np.nan
    refused = make(outputs, names=("timing",))["timing"]
    assert refused[1] is None
    np.testing.assert_allclose(refused[2], [np.nan, 8, 9, 10, 11])


def exact_softmax(outputs):
    shifted = np.exp(outputs.astype(np.float64) - outputs.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def test_softmax_is_float32_and_sums_to_one_also_where_exp_would_overflow():
    outputs = np.concatenate([np.random.default_rng(0).normal(0, 5, (50, 1000)), np.full((1, 1000), 3e4)])
    outputs[-1, 7] = -3e38
    outputs = outputs.astype(np.float32)
    probabilities = activate(outputs, "softmax")
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities.sum(1, dtype=np.float64), 1, atol=1e-5)
    np.testing.assert_allclose(probabilities, exact_softmax(outputs), atol=1e-6)


def test_sigmoid_is_per_output():
    probabilities = activate(np.array([[0, 100, -100]], np.float32), "sigmoid")
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, [[0.5, 1, 0]], atol=1e-6)


def test_no_activation_leaves_the_output_as_it_is():
    np.testing.assert_array_equal(activate(LOGITS, "none"), LOGITS)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_columns_of_one_call_agree_with_one_another(activation):
    outputs = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    made = make(outputs, activation=activation)
    probabilities = activate(outputs, activation)
    assert set(made) == set(ALL)
    assert all(len(made[name]) == 20 for name in ALL)
    for row in range(20):
        np.testing.assert_array_equal(made["rawPrediction"][row], outputs[row])
        np.testing.assert_array_equal(made["probability"][row], probabilities[row])
        assert made["probability"][row].dtype == made["rawPrediction"][row].dtype == np.float32
        assert made["prediction"][row] == outputs[row].argmax()
        assert made["predictedLabel"][row] == NAMES[outputs[row].argmax()] == made["topLabels"][row][0]
        assert made["topProbabilities"][row] == sorted(probabilities[row].tolist(), reverse=True)[:2]


def test_prediction_is_float64_and_top_probabilities_are_python_floats():
    made = make(bad=(1,))
    assert made["prediction"].dtype == np.float64
    assert {type(value) for value in made["topProbabilities"][0]} == {float}
    assert type(made["predictedLabel"][0]) is str


@pytest.mark.parametrize("bad", [(), (0,), (3,), (1, 2), (0, 2, 4), (0, 1, 5)])
def test_failed_rows_are_none_or_nan_in_their_place(bad):
    made = make(bad=bad)
    whole = make()
    good = [row for row in range(3 + len(bad)) if row not in bad]
    for name in ALL:
        assert len(made[name]) == 3 + len(bad)
        for position, row in enumerate(good):
            np.testing.assert_array_equal(made[name][row], whole[name][position], err_msg=name)
    for row in bad:
        assert np.isnan(made["prediction"][row])
        assert made["error"][row] == "empty: no bytes"
        assert made["device"][row] == "cuda:1 (address 3)"
        for name in ("predictedLabel", "probability", "rawPrediction", "topLabels", "topProbabilities"):
            assert made[name][row] is None


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_call_without_one_good_row_has_all_columns(rows):
    made = make(np.empty((0, 3), np.float32), bad=tuple(range(rows)))
    assert np.isnan(made["prediction"]).all()
    for name in ("predictedLabel", "probability", "rawPrediction", "topLabels", "topProbabilities"):
        assert made[name] == [None] * rows
    assert made["error"] == ["empty: no bytes"] * rows
    assert all(len(made[name]) == rows for name in ALL)


def test_only_what_was_asked_for_is_made():
    assert list(make(names=("prediction", "error"))) == ["prediction", "error"]
    assert make(names=()) == {}


def test_an_output_of_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="'probabilities'"):
        make(names=("probabilities",))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_equal_scores_stand_in_the_order_of_their_index_as_the_prediction_has_it(activation):
    outputs = np.tile(np.array([1, 2, 2, 0, 2, 1], np.float32), (1, 50))
    made = make(outputs, labels=(), activation=activation, top_k=300)
    order = [int(label) for label in made["topLabels"][0]]
    assert order == sorted(range(300), key=lambda index: (-outputs[0, index], index))
    assert order[0] == made["prediction"][0] == 1


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 1000])
def test_top_k_holds_k_labels_or_all_there_are(top_k):
    made = make(top_k=top_k)
    for labels, probabilities in zip(made["topLabels"], made["topProbabilities"], strict=True):
        assert len(labels) == len(probabilities) == min(top_k, 3)
        assert len(set(labels)) == len(labels)
        assert probabilities == sorted(probabilities, reverse=True)
    assert made["topLabels"][1] == ["cow", "cat", "dog"][:top_k]


def test_without_labels_the_index_as_text_is_the_label():
    made = make(labels=())
    assert made["predictedLabel"] == ["1", "2", "0"]
    assert made["topLabels"][0] == ["1", "2"]


def test_one_output_has_one_class():
    made = make(np.array([[2], [-2]], np.float32), labels=("smile",), activation="sigmoid")
    assert made["prediction"].tolist() == [0, 0]
    np.testing.assert_allclose(np.concatenate(made["probability"]), [0.880797, 0.119203], atol=1e-6)


def test_infinite_scores_are_ordered_like_any_other():
    made = make(np.array([[-np.inf, np.inf, 0]], np.float32), activation="none", top_k=3)
    assert made["topLabels"] == [["dog", "cow", "cat"]]
    assert made["prediction"].tolist() == [1]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_a_row_with_nan_fails_with_a_reason_and_leaves_the_others_alone(activation):
    outputs = LOGITS.copy()
    outputs[1, 0] = np.nan
    made = make(outputs, bad=(0,), activation=activation)
    assert made["error"] == ["empty: no bytes", None, "bad_value: the model gave NaN for this image", None]
    assert np.isnan(made["prediction"]).tolist() == [True, False, True, False]
    for name in ("predictedLabel", "probability", "rawPrediction", "topLabels", "topProbabilities"):
        assert [value is None for value in made[name]] == [True, False, True, False]
    whole = make(LOGITS[[0, 2]], activation=activation)
    assert [made["predictedLabel"][i] for i in (1, 3)] == whole["predictedLabel"]
