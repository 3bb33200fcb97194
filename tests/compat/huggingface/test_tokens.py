"""Codecs as tokenizers of transformers, and runs as folders that its Auto classes read."""

import dataclasses
import random
import shutil

import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.config import Hyla, Rotary, Run, Softmax, Train, TransformerConfig
from polyhead.tasks import Text
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.tokens import Bytes, codec_of
from polyhead.train import load_model, run

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("polyhead.compat.huggingface.model")
tokenizer_of = ours.tokenizer_of

STORY = "The cat sat on the mat; the hen sat on the hat. Ā naïve café, 日本 😀\n\n\tdef f(x):\n        return x\n"


def trained():
    return text_tokens.train([STORY * 4], 280)


def any_text(count=300, seed=0):
    draw = random.Random(seed)
    planes = [range(1, 128), range(128, 0x800), range(0x800, 0xD800), range(0xE000, 0x11000)]
    return "".join(chr(draw.choice(draw.choice(planes))) for _ in range(count)) + "  \r\n x<|endoftext|> Ā \t"


@pytest.mark.parametrize("codec", [Bytes, trained])
def test_the_tokens_are_those_of_the_codec(codec, tmp_path):
    codec = codec()
    tokenizer_of(codec, max_length=64).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == codec.count
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (64, "left")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == codec.end == 0
    for text in (STORY, "a\0Ā", *(any_text(20, seed) for seed in range(5))):  # shorter than 64
        ids = tokenizer(text)["input_ids"]
        assert ids == codec.encode(text)
        assert tokenizer.decode(ids) == codec.decode(ids) == text
    shuffled = list(range(1, codec.count))
    random.Random(0).shuffle(shuffled)
    assert tokenizer.decode(shuffled) == codec.decode(shuffled)  # half characters, too
    batch = tokenizer(["ab", "abcde"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    short, long = (len(codec.encode(text)) for text in ("ab", "abcde"))
    assert batch["attention_mask"] == [[0] * (long - short) + [1] * short, [1] * long]
    assert tokenizer.decode([0, *codec.encode("Ā"), 0], skip_special_tokens=True) == "Ā"


def language(folder, tokenizer):
    """Two steps of a small language model in `folder`/run."""
    (folder / "story.txt").write_text(STORY * 40)
    task = Text(str(folder / "story.txt"), 16, tokenizer=tokenizer, held_out=0.2, folder=str(folder / "tokens"))
    heads = (Softmax(2), Hyla(2))
    model = TransformerConfig(*task.ends, dim=16, layers=1, heads=heads, causal=True, positions=Rotary(), max_length=32)
    train = Train(steps=2, batch_size=4, warmup=1, eval_batches=1, evaluate=("iid",))
    return dataclasses.replace(Run(task, model, train=train), folder=str(folder / "run"), device="cpu")


@pytest.mark.parametrize("name", ["bytes", "bpe:280"])
def test_from_training_to_auto_model(name, tmp_path):
    run(language(tmp_path, name))
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "story.txt").unlink()  # a run folder is enough
    ours.to_folder(tmp_path / "run", tmp_path / "out", max_shard_size="20KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    config, trained = load_model(tmp_path / "run")
    codec = codec_of(config, tmp_path / "run")
    ids = tokenizer(["The cat", "A hen sat"], padding=True, return_tensors="pt")
    generated = model.generate(**ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    for row, text in zip(generated, ("The cat", "A hen sat"), strict=True):
        assert [row[-5:].tolist()] == ph.generate(trained, [codec.encode(text)], steps=5, temperature=0.0)
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == 0
    assert model.config.eos_token_id == model.config.pad_token_id == 0
    assert tokenizer.model_max_length == 32
    assert len(list((tmp_path / "out").glob("model*.safetensors"))) > 1
    state = torch.random.get_rng_state()
    assert torch.equal(ours.from_run(tmp_path / "run").model(ids["input_ids"]), trained(ids["input_ids"]))
    assert torch.equal(torch.random.get_rng_state(), state)
    if name != "bytes":  # the tokens are those the model was trained with, or nothing is written
        (tmp_path / "run" / "tokenizer.json").write_text(text_tokens.train([STORY[::-1] * 4], 280).text)
        with refusing("but the model was trained with "):
            ours.to_folder(tmp_path / "run", tmp_path / "other")
        assert not (tmp_path / "other").exists()
