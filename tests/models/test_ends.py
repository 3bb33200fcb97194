"""Inputs and outputs: image patches and classes against loops; invalid images give one line."""

from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import Cache
from polyhead.models.inputs_outputs import ClassOutput, PatchInput

F64 = torch.float64
ENDS = ph.Patches((3, 4, 6), (2, 3), class_token=True), ph.Classes(5)
IMAGES = ph.TransformerConfig(*ENDS, dim=16, layers=1, heads=ph.Softmax(2), positions=ph.Learned())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
def test_patches_go_row_by_row(norm, class_token):
    end = PatchInput(ph.Patches((3, 4, 6), (2, 3), norm=norm, class_token=class_token), 8, dtype=F64)
    for parameter in end.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.randn(2, 3, 4, 6, dtype=F64)
    tokens = end(images)
    expected = [end.class_token.weight.expand(2, 8)] if class_token else []
    for top in (0, 2):
        for left in (0, 3):
            pixels = [images[:, :, top + i, left + j] for i in range(2) for j in range(3)]  # channels side by side
            x = torch.cat(pixels, dim=1)
            if norm:
                x = F.layer_norm(x, (18,), end.norm.weight, end.norm.bias)
            x = x @ end.linear.weight.T + end.linear.bias
            expected.append(F.layer_norm(x, (8,), end.norm_out.weight, end.norm_out.bias) if norm else x)
    assert_close(tokens, torch.stack(expected, 1))
    assert tokens.shape[1] == ph.Patches((3, 4, 6), (2, 3), class_token=class_token).count


def test_the_mean_is_over_real_tokens():
    end = ClassOutput(ph.Classes(3), 8, dtype=F64)
    x, mask = torch.randn(3, 5, 8, dtype=F64), torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2:], mask[2] = False, False
    x[1, 2:] = float("nan")  # never read
    means = torch.stack([x[0].mean(0), x[1, :2].mean(0), torch.zeros(8, dtype=F64)])
    assert_close(end(x, mask), end.linear(means)[:, None])
    assert_close(end(x[:1]), end.linear(means[:1])[:, None])


def test_a_class_may_be_read_off_the_first_token():
    end, x = ClassOutput(ph.Classes(3, "class"), 8, dtype=F64), torch.randn(3, 5, 8, dtype=F64)
    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    assert_close(end(x, mask), end.linear(x[:, :1]))


def test_the_length_of_an_image_is_its_number_of_tokens():
    model, image = ph.Transformer(IMAGES), torch.zeros(2, 3, 4, 6)
    assert model.length(image) == model.inputs(image).shape[1] == 5


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_a_model_passes_its_mask_on_to_its_output(pool):
    settings = replace(IMAGES, inputs=ph.Tokens(9), outputs=ph.Classes(4, pool))
    model, tokens = ph.Transformer(settings, dtype=F64).eval(), torch.arange(6)[None]
    assert_close(model(tokens, mask=tokens < 4), model(tokens[:, :4]))


def test_embeddings_may_be_given_in_place_of_tokens():
    """As the loops of other libraries do; other floats are refused."""
    settings = ph.TransformerConfig(ph.Tokens(9, scaled=True), ph.Logits(9), dim=16, layers=1, heads=ph.Softmax(2))
    model = ph.Transformer(settings, dtype=F64)
    tokens = torch.randint(9, (2, 5))
    assert_close(model(model.inputs.table(tokens)), model(tokens))
    refused(lambda: model(torch.randn(2, 5, 15, dtype=F64)), "^Transformer: inputs must be integer tokens")


def test_mistakes_are_one_line():
    model, token = ph.Transformer(IMAGES), replace(IMAGES.inputs, class_token=False)
    tokens, vectors = (ph.Transformer(replace(IMAGES, inputs=end)) for end in (ph.Tokens(3), ph.Vectors(3)))
    images = torch.randn(2, 3, 4, 6)
    ends, words, filled = (ph.Tokens(9), ph.Classes(4)), torch.zeros(2, 4, dtype=torch.long), Cache(2)
    causal = ph.Transformer(ph.TransformerConfig(*ends, dim=16, heads=ph.Softmax(2), causal=True))
    causal(words, cache=filled)
    for call, message in (
        (lambda: causal(words, cache=filled), "a class is read off all positions, but 4 are in the cache$"),
        (lambda: model(images[:, :1]), r"images .* must be floating \(b, 3, 4, 6\), got torch.float32 \(2, 1, 4, 6\)"),
        (lambda: model(images.byte()), r"inputs \(b c height width\) must be of a floating dtype but is torch.uint8"),
        (lambda: model(images, mask=torch.ones(2, 1).bool()), r"mask \(b t\) must .* token, \(2, 5\), but is \(2, 1\)"),
        (lambda: model(images, tail=1), "read off all positions, so tail must be None but is 1"),
        (lambda: tokens(images), "integer tokens"),
        (lambda: tokens(words.short()), "of int32 or int64, got torch.int16"),
        (lambda: vectors(images), r"inputs must be \(b t 3\)"),
        (lambda: ph.Patches((3, 5, 6), (2, 3)), "patches of 2 x 3 do not divide an image of 5 x 6"),
        (lambda: replace(IMAGES, outputs=ph.Classes(2, "class"), inputs=token), "class_token=True"),
        (lambda: replace(IMAGES, outputs=ph.Classes(2, "class"), causal=True), "the first token sees no other"),
    ):
        refused(call, message)
