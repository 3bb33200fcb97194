"""Maps of codes keep what is apart apart; similarities by hand."""

import numpy as np
import pytest
import torch

from polyhead.analysis import embed, similarity


def two_clouds(n: int = 60, h: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 2
    return rng.normal(size=(n, h)) + 12.0 * labels[:, None], labels


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_map_keeps_clouds_apart_and_repeats(method: str) -> None:
    codes, labels = two_clouds()
    first = embed(codes, method, 3)
    assert first.shape == (60, 2)
    assert np.array_equal(first, embed(torch.tensor(codes), method, 3))
    nearest = np.argsort(((first[:, None] - first[None]) ** 2).sum(-1), axis=1)[:, 1]
    assert (labels[nearest] == labels).all()


def test_pca_is_the_plane_of_largest_variance() -> None:
    codes, _ = two_clouds()
    centred = codes - codes.mean(0)
    values = np.linalg.svd(centred, compute_uv=False)[:2]
    plane = embed(codes, "pca")
    assert np.linalg.norm(plane, axis=0) == pytest.approx(values)
    assert plane[:, 0] @ plane[:, 1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("method", ["tsne", "pca"])
@pytest.mark.parametrize("shape", [(4, 8), (7, 1), (12, 2)])
def test_few_codes_and_few_heads(method: str, shape: tuple[int, int]) -> None:
    codes = np.random.default_rng(0).normal(size=shape)
    found = embed(codes, method)
    assert found.shape == (shape[0], 2)
    assert np.isfinite(found).all()


def test_equal_codes_are_one_point() -> None:
    assert (embed(np.full((10, 3), 0.3)) == 0).all()


def test_similarity_of_mean_codes() -> None:
    codes = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-5.0, 0.0], [0.0, 0.0]])
    labels = np.array([7, 7, 2, 4, 5, 9])
    classes, found = similarity(codes, labels)
    assert classes.tolist() == [2, 4, 5, 7, 9]
    r = 0.5**0.5
    wanted = [[1, r, 0, 0, 0], [r, 1, -r, r, 0], [0, -r, 1, -1, 0], [0, r, -1, 1, 0], [0, 0, 0, 0, 0]]
    assert found == pytest.approx(np.array(wanted))


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"^embed: at least 4 codes are needed for a map but 3 came$"):
        embed(np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"^embed: codes must be finite but 1 of 5 are not$"):
        embed(np.array([[0.0], [1.0], [2.0], [np.inf], [3.0]]))
    with pytest.raises(ValueError, match=r"embed: unknown method 'tnse'; did you mean 'tsne'\?"):
        embed(np.random.default_rng(0).normal(size=(9, 2)), "tnse")
    with pytest.raises(ValueError, match=r"^similarity: b = 3 in codes but 2 in labels \(b\) = \(2,\)$"):
        similarity(np.zeros((3, 2)), np.zeros(2, int))
