"""Maps keep separate clusters separate; similarity and purity equal values computed by hand."""

import numpy as np
import pytest
import torch
from refusals import refusing

from polyhead.analysis import embed, purity, similarity


def two_clouds(n: int = 60, h: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 2
    return rng.normal(size=(n, h)) + 12.0 * labels[:, None], labels


def test_a_map_keeps_clouds_apart_and_repeats() -> None:
    codes, labels = two_clouds()
    first = embed(codes, 3)
    assert first.shape == (60, 2)
    assert np.array_equal(first, embed(torch.tensor(codes), 3))
    nearest = np.argsort(((first[:, None] - first[None]) ** 2).sum(-1), axis=1)[:, 1]
    assert (labels[nearest] == labels).all()


@pytest.mark.parametrize("shape", [(4, 8), (7, 1), (12, 2)])
def test_few_codes_and_few_heads(shape: tuple[int, int]) -> None:
    codes = np.random.default_rng(0).normal(size=shape)
    codes /= np.abs(codes).max()
    points = embed(codes, -1)  # as the seed of a run may be
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all()
    assert (embed(np.full(shape, 0.3)) == 0).all()  # equal codes are one point
    assert all(np.array_equal(embed(2.0**power * codes, -1), points) for power in (450, -50))


def test_similarity_of_mean_codes() -> None:
    codes = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-5.0, 0.0], [0.0, 0.0]])
    labels = np.array([7, 7, 2, 4, 5, 9])
    classes, actual = similarity(codes, labels)
    assert classes.tolist() == [2, 4, 5, 7, 9]
    r = 0.5**0.5
    expected = [[1, r, 0, 0, 0], [r, 1, -r, r, 0], [0, -r, 1, -1, 0], [0, r, -1, 1, 0], [0, 0, 0, 0, 0]]
    assert actual == pytest.approx(np.array(expected))


def test_mistakes_are_one_line() -> None:
    codes, labels = np.array([[0.0], [1.0], [2.0], [np.inf]]), np.zeros(4, int)
    for call, message in (
        (lambda: embed(codes[:3]), "embed: a map needs at least 4 codes, got 3"),
        (lambda: embed(codes), "embed: codes must be finite but 1 of 4 are not"),
        (lambda: embed(codes[:, :0]), "embed: codes must be (b h), at least one, but have shape (4, 0)"),
        (lambda: similarity(1e160 * np.eye(4), labels), "means: codes must be finite but 4 of 4 are not"),
        (lambda: purity(np.eye(4), labels, neighbours=4), "purity: neighbours must be 1 to 3, fewer than the 4 codes"),
        (lambda: similarity(np.eye(3), labels), "similarity: b = 3 in codes but 4 in labels (b) = (4,)"),
    ):
        with refusing(message):
            call()


def test_purity_by_loops() -> None:
    rng = np.random.default_rng(0)
    codes, labels = rng.normal(size=(530, 3)), rng.integers(0, 4, 530)
    codes[:, 0] += 0.7 * labels
    shares = []
    for i in range(530):  # more than one block of distances
        distances = [sum((a - b) ** 2 for a, b in zip(codes[i], code, strict=True)) for code in codes]
        nearest = sorted({*range(530)} - {i}, key=distances.__getitem__)[:7]
        shares.append(np.mean([labels[j] == labels[i] for j in nearest]))
    actual, chance = purity(codes, labels, neighbours=7)
    assert actual == pytest.approx(np.mean(shares))
    pairs = [labels[i] == labels[j] for i in range(530) for j in range(530) if i != j]
    assert chance == pytest.approx(np.mean(pairs))
    assert actual > chance + 0.05


def test_ties_share_the_last_places() -> None:
    """Of the code at 0: one neighbour at distance 1 of its class, then two at distance 2, one of them of its class."""
    codes = torch.tensor([[0.0], [1.0], [2.0], [-2.0]])
    labels = torch.tensor([0, 0, 0, 1])
    actual, _ = purity(codes.bfloat16(), labels, neighbours=2)
    # at 0: (1 + 1/2) / 2; at 1: its two nearest are of class 0; at 2: 1 and 0; at -2: none
    assert actual == pytest.approx((0.75 + 1 + 1 + 0) / 4)


def test_centred_similarity_is_of_what_classes_do_not_share() -> None:
    """Mean codes (5, 1), (5, -1), (5, 1), (5, -1): alike at first sight, opposites once the shared 5 is taken away."""
    codes, labels = np.array([[5.0, 1.0], [5.0, -1.0], [5.0, 1.0], [5.0, -1.0]]), np.arange(4)
    assert similarity(codes, labels)[1].min() == pytest.approx(24 / 26)
    expected = np.array([[1, -1, 1, -1], [-1, 1, -1, 1], [1, -1, 1, -1], [-1, 1, -1, 1]])
    np.testing.assert_allclose(similarity(codes, labels, centred=True)[1], expected, atol=1e-12)
    alike = np.full((6, 3), 0.1)  # what is left of them is the rounding of their mean
    assert (similarity(alike, labels.repeat(2)[:6], centred=True)[1] == 0).all()
